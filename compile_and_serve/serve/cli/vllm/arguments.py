"""Translates a command line written for vLLM into one of ours, before it is parsed.

vLLM's grammar is wider than typer's: several values after one flag, underscores in names, JSON as `--flag.key.key VALUE`, both forms of
a switch, numbers such as 32K. Flags that we do not have are mapped, left out with a warning, or refused in one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compile_and_serve.option_fields import parse_count
from compile_and_serve.serve.cli.vllm.catalogue import VllmFlag, catalogue
from compile_and_serve.serve.cli.vllm.decisions import DECISIONS, SAME
from compile_and_serve.serve.cli.vllm.mapping import Mapped

_MERGED = ("--hf-overrides", "--speculative-config")  # JSON objects: several are one
_ON, _OFF = ("true", "1", "on"), ("false", "0", "off")


@dataclass(slots=True)
class Translation:
    """Our arguments. ignored: sentences about flags without effect. refused: sentences; the command must not run."""

    arguments: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OwnFlags:
    """The flags of our command. switches: those without a value. off: of each switch that has one, the spelling that switches it off."""

    spellings: frozenset[str]
    switches: frozenset[str]
    off: Mapping[str, str]

    @classmethod
    def of(cls, parameters: Iterable[Any]) -> OwnFlags:
        """The flags among click's parameters."""
        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        switches = [option for option in options if option.is_flag]
        return cls(
            frozenset(spelling for option in options for spelling in (*option.opts, *option.secondary_opts)),
            frozenset(spelling for option in switches for spelling in (*option.opts, *option.secondary_opts)),
            {spelling: option.secondary_opts[0] for option in switches if option.secondary_opts for spelling in option.opts},
        )


class _Given(NamedTuple):
    """A flag as it stands in the command line, with its values; or, without a flag, a word."""

    flag: str | None
    values: list[str]


def translate(arguments: Sequence[str], own: OwnFlags, *, model_elsewhere: bool = False) -> Translation:
    """Our command line for one of vLLM. model_elsewhere: the model need not be among the arguments."""
    known = catalogue().by_spelling()
    given = list(_split(_without_dots(_plain_names(arguments)), known, own))
    _leave_a_model(given, model_elsewhere)
    result, later, model = Translation(), list[str](), None
    for one in given:
        flag = None if one.flag is None else known.get(one.flag)
        if flag is None:
            result.arguments += one.values if one.flag is None else [one.flag, *one.values]
            continue
        assert one.flag is not None
        decision = DECISIONS.get(one.flag) or DECISIONS.get(flag.name, SAME)
        if decision.outcome == "same":
            result.arguments += _own_form(one, flag, own)
            continue
        values = [("off" if one.flag in flag.off else "on")] if flag.kind == "switch" else one.values
        if decision.outcome == "ignored":
            if not values or not all(_is_default(value, flag) for value in values):
                result.ignored.append(f"{one.flag} has no effect: {decision.text}.")
        elif decision.outcome == "refused":
            if not all(_is_default(value, flag) or value in decision.accepts for value in values):
                shown = one.flag if flag.kind == "switch" else f"{one.flag} {' '.join(values)[:100]}"
                result.refused.append(f"{shown} is not supported: {decision.text}.")
        else:
            assert decision.to is not None
            try:
                mapped: Mapped = decision.to(values) if values else Mapped([flag.name])
            except ValueError as error:
                result.refused.append(str(error))
                continue
            model = mapped.model or model
            result.ignored += [f"{name} has no effect: {why}." for name, why in mapped.ignored.items()]
            # What has our name keeps its place, so that the last of equal flags counts.
            (result.arguments if one.flag in own.spellings else later).extend(mapped.arguments)
    result.arguments = ([] if model is None else [model]) + result.arguments + later
    _merge_objects(result)
    return result


def _plain_names(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments with dashes in names of flags, and with vLLM's -O spelled out."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
        elif argument.startswith("--"):
            name, separator, value = argument.partition("=")
            head, dot, keys = name.partition(".")
            yield head.replace("_", "-") + dot + keys + separator + value
        elif match := re.fullmatch(r"-O=?(\d)", argument):
            yield from ("--optimization-level", match[1])
        else:
            yield "--optimization-level" if argument == "-O" else argument


def _without_dots(arguments: Iterable[str]) -> list[str]:
    """The arguments with `--flag.key VALUE` collected into one JSON object a flag, at the end as in vLLM."""
    plain, objects = list[str](), dict[str, dict[str, Any]]()
    rest = iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        if argument == "--" or not re.fullmatch(r"--?[a-zA-Z][\w-]*\.[^\s=]+", name):
            plain.append(argument)
            continue
        if not separator:
            value = next(rest, "")
        flag, *keys = name.removesuffix("+").split(".")
        entry: Any = value.split(",") if name.endswith("+") else _value(value)
        for key in reversed(keys):
            entry = {key: entry}
        _update(objects.setdefault(flag, {}), entry)
    return plain + [word for flag, content in objects.items() for word in (flag, json.dumps(content))]


def _value(text: str) -> Any:
    for read in (json.loads, parse_count):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _update(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _update(target[key], value)
        elif isinstance(value, list) and isinstance(target.get(key), list):
            target[key] = target[key] + value
        else:
            target[key] = value


def _split(arguments: Sequence[str], known: Mapping[str, VllmFlag], own: OwnFlags) -> Iterator[_Given]:
    """The flags with their values, and the words between them. A flag that nobody knows is passed on as it is."""
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if argument == "--":
            yield _Given(None, list(arguments[position - 1 :]))
            return
        name, separator, value = argument.partition("=")
        flag = known.get(name)
        if not argument.startswith("-") or (flag is None and name not in own.spellings):
            yield _Given(None, [argument])
            continue
        if separator:
            yield _Given(name, [value])
            continue
        limit = 0 if (name in own.switches if flag is None else flag.kind == "switch") else 1
        values = list(arguments[position : position + limit])  # even if it begins with a dash, such as -1
        if flag is not None and flag.kind in ("values", "optional"):
            end = position
            while end < len(arguments) and not arguments[end].startswith("-"):
                end += 1
            values = list(arguments[position:end])[: None if flag.kind == "values" else 1]
        position += len(values)
        yield _Given(name, values)


def _leave_a_model(given: list[_Given], model_elsewhere: bool) -> None:
    """Where no word is left for the model, the last of several values of a flag is the model: `--served-model-name NAME MODEL`."""
    if model_elsewhere or any(one.flag is None or one.flag == "--model" for one in given):
        return
    for one in reversed(given):
        if len(one.values) > 1:
            given.append(_Given(None, [one.values.pop()]))
            return


def _own_form(one: _Given, flag: VllmFlag, own: OwnFlags) -> list[str]:
    """A flag that we have, as our command line takes it."""
    name = one.flag if one.flag in own.spellings else next((s for s in flag.spellings if s in own.spellings), flag.name)
    if flag.kind != "switch":
        return [word for value in one.values for word in (name, value)] or [name]
    is_on = one.flag not in flag.off
    if one.values:  # --flag=false
        if one.values[0].lower() not in (*_ON, *_OFF):
            return [f"{one.flag}={one.values[0]}"]
        is_on = is_on == (one.values[0].lower() in _ON)
    if is_on:
        return [next((s for s in flag.spellings if s in own.spellings), flag.name)]
    # Without a form of ours it is off by default.
    return [own.off[name]] if name in own.off else [one.flag] if one.flag in own.spellings and one.flag else []


def _is_default(value: str, flag: VllmFlag) -> bool:
    if flag.kind == "switch":
        return value == ("on" if flag.default == "True" else "off")
    if flag.default is None:
        return value in ("", "None", "null")
    try:
        return float(value) == float(flag.default)
    except ValueError:
        return value == flag.default or (flag.kind == "json" and value in ("{}", "null"))


def _merge_objects(result: Translation) -> None:
    """Several JSON objects of one flag are one. A flag that is no object is left to our own parser."""
    for flag in _MERGED:
        places = [i for i, word in enumerate(result.arguments[:-1]) if word == flag]
        if len(places) < 2:
            continue
        merged: dict[str, Any] = {}
        for place in places:
            try:
                found = json.loads(result.arguments[place + 1])
            except ValueError:
                return
            if not isinstance(found, dict):
                return
            _update(merged, found)
        for place in reversed(places[1:]):
            del result.arguments[place : place + 2]
        result.arguments[places[0] + 1] = json.dumps(merged)

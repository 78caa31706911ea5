"""Options as fields of frozen dataclasses. Flags, `LLM` arguments and config files are generated from them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Check = tuple[Callable[[Any], bool], str]  # what holds for a value, and the words of the error: "NAME must be …"

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option as Python code and the command line give it; `option` describes the attributes. default: `MISSING` if it is required."""

    name: str
    type: Any
    default: Any
    help: str | None
    panel: str
    flags: tuple[str, ...]
    metavar: str | None
    flag_type: Any
    flag_default: Any
    parse: Callable[[Any], Any] | None
    convert: Callable[[Any], Any] | None
    checks: Sequence[Check]

    @property
    def flag(self) -> str:
        """The flag's first spelling."""
        return self.flags[0] if self.flags else "--" + self.name.replace("_", "-")

    def of_flag(self, given: Any) -> Any:
        """The argument that a flag's value stands for."""
        if given is None or given == []:
            return self.default
        return given if self.parse is None else self.parse(given)

    def of_argument(self, given: Any) -> Any:
        """The field's value. Raises `ValueError` with one sentence if it is not allowed."""
        if given is None and self.default is not None and type(None) not in get_args(self.type):
            require(False, self.name, "given", given)
        value = given
        if self.convert is not None and given is not None:
            value = self.convert(given)
        elif given is not None:
            kind = next((kind for kind in alternatives(self.type) if kind is Path or get_origin(kind) in (tuple, frozenset)), None)
            value = given if kind is None else (get_origin(kind) or kind)(given)
            choices = [choice for kind in alternatives(self.type) if get_origin(kind) is Literal for choice in get_args(kind)]
            require(not choices or value in choices, self.name, "one of " + ", ".join(choices), value)
        for allows, expected in self.checks:
            require(value is None or allows(value), self.name, expected, value)
        return value


def option(
    default: Any,
    help: str | None,
    *,
    name: str | None = None,
    panel: str = "",
    flags: Sequence[str] = (),
    metavar: str | None = None,
    argument_type: Any = None,
    argument_default: Any = MISSING,
    flag_type: Any = None,
    flag_default: Any = MISSING,
    parse: Callable[[Any], Any] | None = None,
    convert: Callable[[Any], Any] | None = None,
    checks: Sequence[Check] = (),
    default_factory: Any = MISSING,
) -> Any:
    """A field that is an option. `Literal` types are its choices; `MISSING` as the default makes it required.

    help: text of the flag; None: there is no flag. name: of the argument in Python, if not the field's. panel: heading in `--help`.
    flags: spellings, if not the name's. A flag that is False by default has no `--no-` form.
    argument_type, argument_default, flag_type, flag_default: where they are not the field's. parse: flag's value → argument.
    convert: argument → field's value. Paths, tuples and sets are made without it.
    """
    metadata = {
        "help": help,
        "name": name,
        "panel": panel,
        "flags": tuple(flags),
        "metavar": metavar,
        "argument_type": argument_type,
        "argument_default": argument_default,
        "flag_type": flag_type,
        "flag_default": flag_default,
        "parse": parse,
        "convert": convert,
        "checks": checks,
    }
    return field(default=default, default_factory=default_factory, metadata={"option": metadata})


def at_least(minimum: int) -> Check:
    """The check that a number is `minimum` or more."""
    return lambda value: value >= minimum, f"at least {minimum}"


def require(ok: bool, name: str, expected: str, value: object) -> None:
    """Raise `ValueError`, "NAME must be EXPECTED, got VALUE.", unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {expected}, got {value!r:.200}.")


@cache
def options_of(config_class: type) -> dict[str, Option]:
    """The options of a config dataclass and of the dataclasses in its fields, by name, in the order of the fields."""
    found: dict[str, Option] = {}
    for item in _members(config_class).values():
        found |= {item.name: item} if isinstance(item, Option) else {} if item is None else options_of(item[0])
    return found


def make_config(config_class: type[T], arguments: Mapping[str, Any]) -> T:
    """An instance from arguments: options by their names, other fields by the fields' names. What is missing has its default.

    Raises `ValueError` with one sentence for a value that is not allowed.
    """
    values = {}
    for name, member in _members(cast(Any, config_class)).items():
        if isinstance(member, Option):
            given = arguments.get(member.name, member.default)
            if given is not MISSING:
                values[name] = member.of_argument(given)
        elif member is not None:
            part, is_optional = member
            if not is_optional or _asks_for(part, arguments):
                values[name] = make_config(part, arguments)
        elif name in arguments:
            values[name] = arguments[name]
    return config_class(**values)


def signature_of(config_class: type, *first: inspect.Parameter) -> inspect.Signature:
    """The signature of a function with the parameters `first` and a config's options as keyword arguments."""
    options = (
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
        for item in options_of(config_class).values()
    )
    return inspect.Signature([*first, *options])


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union without None, or the type itself."""
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return tuple(kind for kind in get_args(annotation) if kind is not type(None))
    return (annotation,)


@cache
def _members(config_class: Any) -> dict[str, Option | tuple[type, bool] | None]:
    """By field: its option, or the dataclass in it and whether it may be None, or None for a field that only code sets."""
    hints, members = get_type_hints(config_class), dict[str, Option | tuple[type, bool] | None]()
    for item in fields(config_class):
        annotation = hints[item.name]
        parts = [kind for kind in alternatives(annotation) if is_dataclass(kind)]
        if "option" in item.metadata:
            members[item.name] = _option_of(item, annotation)
        else:
            members[item.name] = (cast(type, parts[0]), annotation != parts[0]) if parts else None
    return members


def _option_of(item: Field[Any], annotation: Any) -> Option:
    metadata = dict(item.metadata["option"])
    annotation = metadata.pop("argument_type") or annotation
    default, flag_default = metadata.pop("argument_default"), metadata.pop("flag_default")
    default = item.default if default is MISSING else default
    is_collection = any(get_origin(kind) in (tuple, frozenset) for kind in alternatives(annotation))
    flag_type = metadata.pop("flag_type") or (list[str] if is_collection else annotation)
    if flag_default is MISSING:
        flag_default = None if is_collection or default is MISSING else default
    return Option(
        **metadata | {"name": metadata["name"] or item.name},
        type=annotation,
        default=default,
        flag_type=flag_type if flag_default is not None else flag_type | None,
        flag_default=flag_default,
    )


def _asks_for(part: type, arguments: Mapping[str, Any]) -> bool:
    """Whether arguments ask for this optional part. Raises `ValueError` if they do and a required one is missing."""
    options = options_of(part).values()
    given = [item for item in options if arguments.get(item.name) not in (None, False)]
    missing = [item for item in options if item.default is MISSING and item not in given]
    if given and missing:
        raise ValueError(f"{given[0].flag} needs {missing[0].flag}.")
    return bool(given)


def json_object(name: str) -> Callable[[Mapping[str, Any] | str], dict[str, Any]]:
    """Reads an object, also from JSON text. The function raises `ValueError`, "NAME must be a JSON object …"."""

    def read(given: Mapping[str, Any] | str) -> dict[str, Any]:
        found, reason = given, ""
        if isinstance(given, str):
            try:
                found = json.loads(given)
            except ValueError as error:
                found, reason = given, f" ({error})"
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} must be a JSON object{reason}, got {given!r:.200}.")
        return dict(found)

    return read


def parse_size(text: str) -> int:
    """The number of bytes in "2G", "512MiB", "1.5GiB" or "1000000". Raises `ValueError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"A size must be like 2G, 512MiB or a number of bytes, got {text!r}.")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def parse_count(text: str) -> int:
    """The number in "4096", "32k" (32,000), "32K" (32,768), "25.6k" or "1m", as vLLM reads it. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"(-?\d+)|(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", text.strip())
    if match is None:
        raise ValueError(f"A number must be like 4096, 32k (32000) or 32K (32768), got {text!r:.100}.")
    whole, decimal, decimal_unit, binary, binary_unit = match.groups()
    if whole is not None:
        return int(whole)
    if decimal is not None:
        return int(float(decimal) * 1000 ** ("kmgt".index(decimal_unit) + 1))
    return int(binary) * 1024 ** ("KMGT".index(binary_unit) + 1)


def parse_counts(text: str) -> list[int]:
    """The numbers in a list such as "1,2,4". Raises `ValueError` for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"Token counts must be numbers separated by commas, got {text!r}.") from None

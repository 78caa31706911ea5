"""`--config FILE`: values of a command's flags from a YAML file. Flags on the command line win."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, ClassVar

import typer

from compile_and_serve.serve.cli.vllm.catalogue import catalogue
from compile_and_serve.serve.cli.vllm.command import values_of
from compile_and_serve.serve.cli.vllm.decisions import DECISIONS

_NOT_IN_FILE = frozenset({"help", "config"})
# Other plain words stay text: as a number, the key 0123 would become 83.
_YAML_TAGS = frozenset({f"tag:yaml.org,2002:{name}" for name in ("bool", "null", "merge")})


def apply_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command's flags: the callback of an eager option."""
    if path is not None and not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **_read(context, path)}
    return path


def _read(context: typer.Context, path: Path) -> dict[str, Any]:
    import yaml

    class TextLoader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag in _YAML_TAGS]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        text = path.read_text(encoding="utf-8")
        content, typed = yaml.load(text, TextLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}.") from None
    except RecursionError:
        raise typer.BadParameter(f"{path} is nested too deeply: flags take values, lists and at most a few levels of objects.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of numbers and dates that are none
        raise typer.BadParameter(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must map flags to values, like 'port: 8001'.")
    parameters = {}
    for parameter in context.command.params:
        for spelling in (parameter.name, *parameter.opts):
            if spelling and parameter.name not in _NOT_IN_FILE:
                parameters[spelling.lstrip("-").replace("-", "_")] = parameter
    values, of_vllm = {}, list[str]()
    for name, value in content.items():
        known = parameters.get(str(name).replace("-", "_"))
        flag = "--" + str(name).replace("_", "-")
        is_of_vllm = flag in catalogue().by_spelling() and str(name) not in _NOT_IN_FILE
        if not is_of_vllm and (known is None or known.name is None):
            raise typer.BadParameter(f"{path}: {context.info_name} has no flag {flag}.")
        if value is None:  # an empty value leaves the flag unset
            continue
        if known is None or known.name is None or (is_of_vllm and (flag in DECISIONS or isinstance(value, dict))):
            of_vllm += _as_arguments(flag, typed[name] if isinstance(value, dict) else value)
            continue
        is_flag, takes_many = getattr(known, "is_flag", False), getattr(known, "multiple", False)
        if is_flag != isinstance(value, bool):
            expected = "true or false" if is_flag else "a value, in quotes if it is a word that YAML takes for one"
            raise typer.BadParameter(f"{path}: {name} must be {expected}, got {reprlib.repr(value):.200}.")
        if isinstance(value, (dict, list)) and not (takes_many and isinstance(value, list)):
            raise typer.BadParameter(f"{path}: {name} must be a single value, got {reprlib.repr(value):.200}.")
        if takes_many:
            value = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str) for one in value):
                raise typer.BadParameter(f"{path}: {name} must be a list of values: put words like yes and null in quotes.")
        values[known.name] = value
    return (values_of(context, of_vllm) | values) if of_vllm else values


def _as_arguments(flag: str, value: Any) -> list[str]:
    """A flag of vLLM with the value that a YAML file gives it, as words of a command line."""
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, *(str(one) for one in (value if isinstance(value, list) else [value]))]

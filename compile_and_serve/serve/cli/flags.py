"""Flags made from the fields of config dataclasses. A flag that vLLM has too carries vLLM's name."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from compile_and_serve.option_fields import MISSING, Option, options_of
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.serve.cli.output import run_command
from compile_and_serve.serve.settings import ServerSettings

COMPILER_PANEL, CONNECTION_PANEL, ACCESS_PANEL = "Compiler", "Connections", "Access"
_SERVER_PANELS = ("Server", "LoRA", COMPILER_PANEL)

ModelArgument = Annotated[str, typer.Argument(help="A model folder, a .gguf file, the name smollm2-135m, or a Hugging Face Hub id.")]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Log more, and show tracebacks of errors.")]


def _groups() -> dict[str, list[Option]]:
    """By the name of a command's parameter, the options whose flags take its place. Panels appear in `--help` in this order."""
    panels = (
        "Model",
        "Images, videos and audio",
        "KV cache and prefix cache",
        "Scheduler",
        COMPILER_PANEL,
        "Ranks and replicas",
        "LoRA",
        "Device",
    )
    server, engine = options_of(ServerSettings).values(), options_of(EngineConfig).values()
    return {
        "server_options": [item for item in server if item.panel in _SERVER_PANELS],
        "connection_options": [item for item in server if item.panel not in _SERVER_PANELS],
        "engine_options": sorted(engine, key=lambda item: panels.index(item.panel)),
    }


def flag_parameters(options: Iterable[Option]) -> dict[str, inspect.Parameter]:
    """By the option's name, its flag as a parameter that typer reads."""
    parameters = {}
    for item in options:
        if item.help is None:
            continue
        spellings = item.flags or ((item.flag,) if item.flag_default is False else ())
        info = typer.Option(*spellings, help=item.help, metavar=item.metavar, rich_help_panel=item.panel or None)
        # The key in a config file: the flag's name, even where the argument's differs.
        name = item.flag.lstrip("-").replace("-", "_")
        parameters[item.name] = inspect.Parameter(
            item.name if keyword.iskeyword(name) else name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.flag_default,
            annotation=Annotated[item.flag_type, info],
        )
    return parameters


def arguments_of_flags(options: Iterable[Option], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that flags stand for. Raises `ValueError` for a flag that cannot be parsed."""
    options = list(options)
    parameters = flag_parameters(options)
    values = {item.name: item.of_flag(flags[parameters[item.name].name]) for item in options if item.name in parameters}
    return {name: value for name, value in values.items() if value is not MISSING}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: errors print one sentence, `--verbose` is added, and parameters named in `_groups` become their flags."""
    own = inspect.signature(function, eval_str=True)
    groups = {name: options for name, options in _groups().items() if name in own.parameters}
    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        parameters += flag_parameters(groups[parameter.name]).values() if parameter.name in groups else [parameter]
    verbose_flag = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VerboseFlag)

    @wraps(function)
    def wrapper(verbose: bool = False, **values: Any) -> None:
        def run() -> None:
            given = {name: arguments_of_flags(options, values) for name, options in groups.items()}
            function(**given, **{name: value for name, value in values.items() if name in own.parameters})

        run_command(run, verbose=verbose)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = own.replace(parameters=[*keyword_only, verbose_flag])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*keyword_only, verbose_flag]}
    return wrapper

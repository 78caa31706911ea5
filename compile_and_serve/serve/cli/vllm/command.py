"""`VllmCommand`: a command that takes vLLM's command line, from its arguments and from `--config`."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
import typer.core

from compile_and_serve.serve.cli.vllm.arguments import OwnFlags, Translation, translate

_translation: ContextVar[Translation] = ContextVar("translation")  # of the command line that is being parsed or run


class VllmCommand(typer.core.TyperCommand):
    """Translates the arguments before they are parsed. `check_flags` and `sentences_about_flags` tell what came of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse vLLM's command line."""
        translation = translate(args, OwnFlags.of(self.params), model_elsewhere=_file_has_a_model(args))
        _translation.set(translation)
        return super().parse_args(ctx, translation.arguments)


def values_of(context: typer.Context, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command line of vLLM without a model, by the names of our command's parameters."""
    command: Any = context.command
    translation = translate(arguments, OwnFlags.of(command.params), model_elsewhere=True)
    noted = _translation.get(Translation())
    noted.ignored += translation.ignored
    noted.refused += translation.refused
    values, _, _ = command.make_parser(context).parse_args(args=translation.arguments)
    return dict(values)


def check_flags() -> None:
    """Raise `ValueError` with one sentence for each flag of this command line that cannot be honoured."""
    refused = _translation.get(Translation()).refused
    if refused:
        raise ValueError(" ".join(refused))


def sentences_about_flags() -> list[str]:
    """A sentence for each flag of this command line that has no effect."""
    return list(dict.fromkeys(_translation.get(Translation()).ignored))


def _file_has_a_model(arguments: Sequence[str]) -> bool:
    """Whether `--config FILE` names the model. A file that cannot be read is reported where it is parsed."""
    import yaml

    paths = [value for name, value in pairwise(arguments) if name == "--config"]
    paths += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    for path in paths:
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return True
        if isinstance(content, dict) and ("model" in content or "model_tag" in content):
            return True
    return False

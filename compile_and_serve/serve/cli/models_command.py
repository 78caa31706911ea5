"""`compile-and-serve models`: which architectures have a module of our own, and what each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from compile_and_serve.models.registry import Family


def models_command() -> None:
    """List the supported architectures and their features."""
    from compile_and_serve.models.registry import ARCHITECTURES  # imports torch

    width = max(map(len, ARCHITECTURES))
    for architecture, family in sorted(ARCHITECTURES.items()):
        typer.echo(f"{architecture:{width}}  {', '.join(_features(family))}")
    typer.echo("Other decoders run in the transformers package's implementation, if their attention is recognized.")


def _features(family: Family) -> list[str]:
    windows = ["sliding windows"] if family.windowed is not None else []
    experts = ["experts"] if family.experts is not None else []
    return ["full attention", *windows, *experts]

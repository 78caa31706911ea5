"""`compile-and-serve models`: which architectures have a module of our own, and what each takes."""

from __future__ import annotations

import typer


def models_command() -> None:
    """List the supported architectures and their features."""
    from compile_and_serve.models.families import known_families  # imports torch

    families = known_families()
    width = max(map(len, families))
    for architecture, family in sorted(families.items()):
        typer.echo(f"{architecture:{width}}  {', '.join(family.features)}")
    typer.echo("Other decoders run in the transformers package's implementation, if their attention is recognized.")

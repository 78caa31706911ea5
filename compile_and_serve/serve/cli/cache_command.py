"""`compile-and-serve cache ls | prune | verify`: look after the artifacts of compiled models."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from compile_and_serve.compiler.artifacts.store import ArtifactStore

cache_app = typer.Typer(
    help="List, check and remove the artifacts of compiled models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

CacheDir = Annotated[Path | None, typer.Option(help="Folder of the artifacts; the user's cache by default.")]
SECONDS_A_DAY = 86400.0


@cache_app.command("ls")
def list_artifacts(cache_dir: CacheDir = None) -> None:
    """One line an artifact: what it is of, for which toolchain, how large, when last used."""
    store = _store(cache_dir)
    table = Table(title=str(store.root), title_justify="left")
    for column in ("kind", "key", "of", "torch", "device", "KiB", "days unused"):
        table.add_column(column, justify="right" if column in ("KiB", "days unused") else "left")
    for entry in store.entries():
        try:
            fields = entry.manifest["fields"]
        except (OSError, ValueError, KeyError):
            fields = {}
        of = (
            f"{fields['architecture']} × {fields['layers']}"
            if "architecture" in fields
            else fields.get("fingerprint", "")[:12] or fields.get("pass", "?")
        )
        days = (time.time() - entry.last_used()) / SECONDS_A_DAY
        torch_version = str(fields.get("torch", "?")).split(" ")[0]
        table.add_row(
            entry.kind, entry.key[:12], of, torch_version, str(fields.get("capability", "?")),
            f"{entry.size() / 1024:.0f}", f"{days:.1f}",
        )  # fmt: skip
    Console().print(table)


@cache_app.command("verify")
def verify_artifacts(cache_dir: CacheDir = None) -> None:
    """Check every file of every artifact against its manifest; exit code 1 if one is damaged."""
    from compile_and_serve.compiler.artifacts.store import ArtifactError

    store, damaged = _store(cache_dir), 0
    for entry in store.entries():
        try:
            entry.verify()
        except ArtifactError as error:
            damaged += 1
            typer.echo(f"damaged: {error}")
    typer.echo(f"{len(store.entries()) - damaged} whole, {damaged} damaged in {store.root}")
    if damaged:
        typer.echo("They are not used, and made again at the next start; `cache prune` removes them now.")
        raise typer.Exit(1)


@cache_app.command("prune")
def prune_artifacts(
    cache_dir: CacheDir = None,
    older_than: Annotated[float | None, typer.Option(help="Also remove what was not used for so many days.")] = None,
    all_artifacts: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
) -> None:
    """Remove artifacts that cannot be used any more: damaged ones, those of another torch, and unfinished writes."""
    import torch

    from compile_and_serve.compiler.artifacts.store import ArtifactError

    store, removed, freed = _store(cache_dir), 0, 0
    for entry in store.entries():
        try:
            entry.verify()
            useless = str(entry.manifest["fields"].get("torch")).split(" ")[0] != torch.__version__
        except ArtifactError:
            useless = True
        unused_days = (time.time() - entry.last_used()) / SECONDS_A_DAY
        if all_artifacts or useless or (older_than is not None and unused_days > older_than):
            freed += entry.size()
            entry.remove()
            removed += 1
    for folder in store.leftovers():
        shutil.rmtree(folder, ignore_errors=True)
    typer.echo(f"removed {removed} artifacts, {freed / 2**20:.1f} MiB, from {store.root}")


def _store(cache_dir: Path | None) -> ArtifactStore:
    from compile_and_serve.compiler.artifacts.store import ArtifactStore, default_root

    return ArtifactStore(cache_dir or default_root())

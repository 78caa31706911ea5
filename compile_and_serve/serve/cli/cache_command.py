"""`compile-and-serve cache ls | prune | verify`: the artifacts of compiled models, and what the tuner has measured."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from compile_and_serve.runtime.connector.tiers.disk_folder import files_in, remove_unused

if TYPE_CHECKING:
    from compile_and_serve.compiler.artifacts.store import ArtifactStore

cache_app = typer.Typer(
    help="List, check and remove the artifacts of compiled models and the measurements of kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

CacheDir = Annotated[Path | None, typer.Option(help="Folder of the artifacts and measurements; the user's cache by default.")]
KvOffloadDir = Annotated[Path | None, typer.Option(help="Folder of a server's --kv-offload-dir, to be looked at instead.")]
SECONDS_PER_DAY = 86400.0


@cache_app.command("ls")
def list_artifacts(cache_dir: CacheDir = None, kv_offload_dir: KvOffloadDir = None) -> None:
    """List the artifacts (content, toolchain, size, days since the last use) and the measurements of kernels."""
    if kv_offload_dir is not None:
        Console().print(_kept_blocks(kv_offload_dir))
        return
    from compile_and_serve.compiler.artifacts.store import ArtifactError

    store = _store(cache_dir)
    table = Table(title=str(store.root), title_justify="left")
    for column in ("kind", "key", "content", "torch", "device", "KiB", "days unused"):
        table.add_column(column, justify="right" if column in ("KiB", "days unused") else "left")
    for entry in store.entries():
        try:
            fields = entry.manifest["fields"]
        except (OSError, ArtifactError):
            fields = {}
        content = (
            f"{fields['architecture']} × {fields.get('layers', '?')}"
            if "architecture" in fields
            else str(fields.get("fingerprint", "?"))[:12]
        )
        days = (time.time() - entry.last_used()) / SECONDS_PER_DAY
        torch_version = str(fields.get("torch", "?")).split(" ")[0]
        table.add_row(
            entry.kind,
            entry.key[:12],
            content,
            torch_version,
            str(fields.get("capability", "?")),
            f"{entry.size() / 1024:.0f}",
            f"{days:.1f}",
        )
    Console().print(table)
    Console().print(_measurements(cache_dir))


def _kept_blocks(root: Path) -> Table:
    """What a folder keeps of KV caches: a row for each model with its options."""
    table = Table(title=str(root), title_justify="left")
    for column in ("model", "files", "MiB", "days unused"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        found = [path.stat() for path in map(Path, files_in(folder)) if path.exists()]
        days = (time.time() - max((one.st_mtime for one in found), default=time.time())) / SECONDS_PER_DAY
        table.add_row(folder.name[:12], str(len(found)), f"{sum(one.st_size for one in found) / 2**20:.0f}", f"{days:.1f}")
    return table


def _measurements(cache_dir: Path | None) -> Table:
    from compile_and_serve.custom_ops.tuning.store import stored_files, tuning_folder

    folder = tuning_folder(cache_dir)
    table = Table(title=str(folder), title_justify="left")
    for column in ("kind", "device", "problems", "torch", "kernels"):
        table.add_column(column, justify="right" if column == "problems" else "left")
    for file in stored_files(folder):
        state = "current" if file.is_current else "stale: not read"
        table.add_row(file.kind, file.device, str(file.num_problems), file.torch, state)
    return table


@cache_app.command("verify")
def verify_artifacts(cache_dir: CacheDir = None) -> None:
    """Check the files of every artifact against its manifest. Exits with code 1 if one is damaged."""
    from compile_and_serve.compiler.artifacts.store import ArtifactError

    store, damaged = _store(cache_dir), 0
    for entry in store.entries():
        try:
            entry.verify()
        except ArtifactError as error:
            damaged += 1
            typer.echo(f"damaged: {error}")
        except OSError as error:
            damaged += 1
            typer.echo(f"cannot be read: {error}")
    typer.echo(f"{len(store.entries()) - damaged} intact, {damaged} damaged in {store.root}")
    if damaged:
        typer.echo("Damaged artifacts are not used. The next start rebuilds them; `cache prune` removes them now.")
        raise typer.Exit(1)


@cache_app.command("prune")
def prune_artifacts(
    cache_dir: CacheDir = None,
    older_than: Annotated[float | None, typer.Option(help="Also remove artifacts that were not used for this many days.")] = None,
    all_artifacts: Annotated[bool, typer.Option("--all", help="Remove all artifacts and measurements.")] = False,
    kv_offload_dir: KvOffloadDir = None,
) -> None:
    """Remove artifacts that can no longer be used (damaged, unfinished, of another torch version) and stale measurements.

    Of a --kv-offload-dir: what processes that died left, and with --older-than or --all what was not used for so long, or everything.
    """
    if kv_offload_dir is not None:
        limit = 0.0 if all_artifacts else float("inf") if older_than is None else older_than * SECONDS_PER_DAY
        count, num_bytes = remove_unused(kv_offload_dir, limit)
        typer.echo(f"removed {count} files, {num_bytes / 2**20:.1f} MiB, from {kv_offload_dir}")
        return
    import torch

    from compile_and_serve.compiler.artifacts.store import ArtifactError
    from compile_and_serve.custom_ops.tuning.store import stored_files, tuning_folder

    store, removed, freed = _store(cache_dir), 0, 0
    for entry in store.entries():
        try:
            entry.verify()
            useless = str(entry.manifest["fields"].get("torch")).split(" ")[0] != torch.__version__
        except ArtifactError:
            useless = True
        except OSError as error:
            typer.echo(f"kept, because it cannot be read: {error}")
            continue
        unused_days = (time.time() - entry.last_used()) / SECONDS_PER_DAY
        if all_artifacts or useless or (older_than is not None and unused_days > older_than):
            freed += entry.size()
            entry.remove()
            removed += 1
    for folder in store.leftovers():
        shutil.rmtree(folder, ignore_errors=True)
    typer.echo(f"removed {removed} artifacts, {freed / 2**20:.1f} MiB, from {store.root}")
    stale = [file for file in stored_files(tuning_folder(cache_dir)) if all_artifacts or not file.is_current]
    for file in stale:
        file.remove()
    typer.echo(f"removed {sum(file.num_problems for file in stale)} measurements from {tuning_folder(cache_dir)}")


def _store(cache_dir: Path | None) -> ArtifactStore:
    from compile_and_serve.compiler.artifacts.store import ArtifactStore, default_root

    return ArtifactStore(cache_dir or default_root())

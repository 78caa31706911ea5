"""The artifacts of one model: its plan and its compiled pieces.

They are looked for in the folder given by the user (`artifact_dir`), which is never changed, then in the cache, where new ones are
written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.artifacts.cache_key import piece_fields
from compile_and_serve.compiler.artifacts.store import ArtifactStore, Entry, default_root, is_machine_error
from compile_and_serve.compiler.built_kernels import built_kernels
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.inductor import CompiledPiece, load_pieces
from compile_and_serve.compiler.pieces.fingerprint import normalized_text
from compile_and_serve.compiler.pieces.plan import ExecutionPlan
from compile_and_serve.compiler.pieces.plan_function import plan_source
from compile_and_serve.custom_ops.library import OPS
from compile_and_serve.custom_ops.tuning.store import tuning_folder

log = logging.getLogger(__name__)

PLAN, FORWARD = "plan.json", "forward.py"  # files of a plan
SOURCE, GRAPH, KERNELS = "piece.py", "graph.txt", "kernels"  # files of a piece; `kernels` is a folder
BUILT = "kernels.json"  # `built_kernels` of a piece

OpVersions = Mapping[str, dict[str, int]]  # piece → our ops in it → version


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """What is stored of a whole model. passes: the rows of the pass report.

    plain: the plan of steps that use no optional input; None: there is one plan for all. op_versions: of the pieces of both.
    """

    plan: ExecutionPlan
    op_versions: OpVersions
    passes: list[dict[str, Any]]
    plain: ExecutionPlan | None = None

    @property
    def pieces(self) -> tuple[str, ...]:
        """Fingerprints of the distinct pieces of both plans."""
        return tuple(dict.fromkeys((*self.plan.pieces, *(self.plain.pieces if self.plain else ()))))


class ModelArtifacts:
    """Finds, loads and writes the artifacts of a model for one device."""

    def __init__(self, config: CompileConfig, device: torch.device) -> None:
        self.stores: list[ArtifactStore] = []  # empty without the cache
        self.tuning_folders: list[Path] = []  # measurements are read from all of them and written to the last
        self._device = device
        self._artifact_dir = config.artifact_dir
        self._explained: set[str] = set()  # kinds for which a miss in `artifact_dir` has been explained
        if config.use_cache:
            if config.artifact_dir is not None:
                self.stores.append(ArtifactStore(config.artifact_dir, read_only=True))
                self.tuning_folders.append(tuning_folder(config.artifact_dir))
            self.stores.append(ArtifactStore(config.cache_dir or default_root()))
            self.tuning_folders.append(tuning_folder(config.cache_dir))

    def lock(self, fields: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Held while a model is compiled, so that other processes wait for its artifact instead of compiling it, too."""
        return self.stores[-1].lock(fields) if self.stores else contextlib.nullcontext()

    def find_plan(self, fields: Mapping[str, Any]) -> tuple[Entry, StoredPlan] | None:
        """The stored plan with these fields, or None. In `artifact_dir`, a warning says which fields differ.

        The fields cover the sources of our own ops. An op from outside is known by its version.
        """
        entry = self._find("plan", fields)
        if entry is None:
            return None
        try:
            stored = json.loads((entry.path / PLAN).read_text())
        except OSError as error:  # another process has removed it
            log.info("The artifact %s is gone: %s.", entry.path, error)
            return None
        versions = {name: version for ops in stored["ops"].values() for name, version in ops.items()}
        if changed := [name for name, version in versions.items() if name in OPS and OPS[name].version != version]:
            log.info("Not using the artifact %s: %s has another version now.", entry.path, ", ".join(changed))
            return None
        plan = ExecutionPlan.from_json(stored["plan"])
        plain = None if stored["plain"] is None else ExecutionPlan.from_json(stored["plain"])
        return entry, StoredPlan(plan=plan, plain=plain, op_versions=stored["ops"], passes=stored["passes"])

    def find_piece(self, piece: str, op_versions: OpVersions) -> Entry | None:
        """The artifact of a piece, by its fingerprint; None if there is none."""
        return self._find("piece", piece_fields(piece, op_versions[piece], self._device))

    def load(self, entries: Mapping[str, Entry], folder: Path) -> dict[str, CompiledPiece]:
        """Load pieces by fingerprint. Their kernels are copied to `folder`, where no other process can change them.

        Raises whatever importing the generated modules raises.
        """
        for entry in entries.values():
            if (entry.path / KERNELS).is_dir():
                shutil.copytree(entry.path / KERNELS, folder, copy_function=_copy_if_missing, dirs_exist_ok=True)
        sources = {piece: (entry.path / SOURCE).read_text() for piece, entry in entries.items()}
        built = {piece: file for piece, entry in entries.items() if (file := entry.path / BUILT).is_file()}
        return load_pieces(sources, self._device, folder, {piece: json.loads(file.read_text()) for piece, file in built.items()})

    def reject(self, error: Exception, *entries: Entry) -> None:
        """Have artifacts replaced of which at least one cannot be loaded. They are kept if the reason is an error of the machine."""
        paths = " and ".join(str(entry.path) for entry in entries)
        what = "it" if len(entries) == 1 else "one of them"
        reason = f"{type(error).__name__}: {error}"
        log.warning("Not using the artifact %s: %s cannot be loaded (%s). Compiling.", paths, what, reason)
        log.debug("Loading failed here:", exc_info=error)
        if not is_machine_error(error):
            for store in self.stores:
                for entry in entries:
                    store.reject(entry)

    def write_plan(self, fields: Mapping[str, Any], stored: StoredPlan, folder: Path) -> None:
        """Store a plan; `folder` is used for its files. It replaces a plan with the same fields."""
        data = {
            "plan": stored.plan.to_json(),
            "plain": stored.plain and stored.plain.to_json(),
            "ops": stored.op_versions,
            "passes": stored.passes,
        }
        _write(folder, {PLAN: json.dumps(data), FORWARD: plan_source(stored.plan)})
        if self.stores:
            # A plan contains measured choices, so it only fits the pieces that were compiled with it.
            self.stores[-1].put("plan", fields, folder, replaces=True)

    def write_piece(self, piece: str, op_versions: OpVersions, compiled: CompiledPiece, graph: GraphModule, folder: Path) -> None:
        """Store a piece, whose kernels are in `folder`/kernels."""
        shutil.rmtree(folder / KERNELS / "locks", ignore_errors=True)
        built = built_kernels(compiled.source, compiled.run)
        _write(folder, {SOURCE: compiled.source, GRAPH: normalized_text(graph), BUILT: json.dumps(built)})
        if self.stores:
            self.stores[-1].put("piece", piece_fields(piece, op_versions[piece], self._device), folder)

    def _find(self, kind: str, fields: Mapping[str, Any]) -> Entry | None:
        for store in self.stores:
            if entry := store.get(kind, fields):
                return entry
        if self._artifact_dir is not None and self.stores and kind not in self._explained:
            self._explained.add(kind)
            reason = self.stores[0].explain_miss(kind, fields) or f"it holds no {kind} that can be used"
            if not self._artifact_dir.is_dir():
                reason = "it is not a folder"
            log.warning("The artifact %s does not fit this %s: %s. Compiling.", self._artifact_dir, kind, reason)
        return None


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def _copy_if_missing(source: str, target: str) -> None:
    """Copy a file unless it exists. Pieces share kernels, named by content, and a loaded one must not be overwritten."""
    if not os.path.exists(target):
        shutil.copy2(source, target)

"""Checkpoints of drafters: the files that only they come in, and tensors that a drafter takes from its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.weights.checkpoint import Checkpoint, open_checkpoint, read_config
from compile_and_serve.runtime.weights.pickled import PickledCheckpoint

MEDUSA_FILE = "medusa_lm_head.pt"


def open_drafter(path: Path) -> Checkpoint:
    """A drafter's checkpoint: as `open_checkpoint` reads it, or Medusa's file of torch.save. Raises `WeightError`."""
    file = path / MEDUSA_FILE
    if file.is_file() and not list(path.glob("*.safetensors*")):
        return PickledCheckpoint({file: None})
    return open_checkpoint(path)


def drafter_config(config: EngineConfig) -> dict[str, Any]:
    """The config.json of the model that `speculative_config` names."""
    assert config.drafter_path is not None
    given = read_config(config.drafter_path, is_whole=False)
    inner = given.get("transformer_layer_config")  # as the package `speculators` writes it
    return given if not isinstance(inner, dict) else {**inner, **{name: value for name, value in given.items() if value is not None}}


def drafter_shapes(config: EngineConfig) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of this model's tensors; empty for random weights."""
    assert config.drafter_path is not None
    return open_drafter(config.drafter_path).shapes if config.model.load_format == "auto" else {}


class JoinedCheckpoint:
    """A drafter's tensors, and those that it borrows from its target.

    is_own: whether one of the drafter's tensors is meant. borrowed: name → names of the target's tensor, the first that there is.
    rows: name → the rows that are borrowed, int64; all of a tensor that is not named.
    """

    def __init__(
        self,
        own: Checkpoint,
        target: Callable[[], Checkpoint],
        is_own: Callable[[str], bool],
        borrowed: Mapping[str, Sequence[str]],
        rows: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._own, self._rows = own, rows or {}
        self.shapes = {name: shape for name, shape in own.shapes.items() if is_own(name)}
        self._target = target() if borrowed else None
        self._borrowed: dict[str, list[str]] = {}  # target's name → names here
        for name, candidates in borrowed.items():
            assert self._target is not None
            found = next((one for one in candidates if one in self._target.shapes), None)
            if found is not None:
                self._borrowed.setdefault(found, []).append(name)
                shape = tuple(self._target.shapes[found])
                self.shapes[name] = (len(self._rows[name]), *shape[1:]) if name in self._rows else shape

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        borrowed = {name for held in self._borrowed.values() for name in held}
        yield from self._own.stream({name for name in names - borrowed if name in self.shapes})
        if self._target is not None:
            wanted = {source for source, held in self._borrowed.items() if names & set(held)}
            for source, tensor in self._target.stream(wanted):
                for name in self._borrowed[source]:
                    if name in names:
                        yield name, tensor[self._rows[name].to(tensor.device)] if name in self._rows else tensor

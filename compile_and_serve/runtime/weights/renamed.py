"""Checkpoints whose tensors have other prefixes than the model's: those of a base model, of a wrapper, or of both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from compile_and_serve.runtime.weights.checkpoint import Checkpoint

# Put before every name by torch.compile, DistributedDataParallel and PEFT, and by models that read more than text.
_WRAPPERS = ("_orig_mod.", "module.", "base_model.model.", "thinker.", "language_model.", "text_model.")
_BASE = "model."
_BASES_OF_TEXT = ("model.language_model.", "model.text_model.")


def with_model_names(checkpoint: Checkpoint, known: Collection[str]) -> Checkpoint:
    """The checkpoint with the model's names where it has another prefix. known: names of the model."""
    taken = {name for name in checkpoint.shapes if name in known}
    renamed: dict[str, str] = {}
    for name in checkpoint.shapes:
        if name not in known and (ours := next((one for one in _spellings(name) if one in known and one not in taken), None)):
            renamed[name] = ours
            taken.add(ours)
    return _RenamedCheckpoint(checkpoint, renamed) if renamed else checkpoint


def _spellings(name: str) -> Iterator[str]:
    """Names that the tensor may have in the model."""
    stem = name
    while True:
        yield from (stem, _BASE + stem, stem.removeprefix(_BASE))
        for base in _BASES_OF_TEXT:
            if stem.startswith(base):
                yield _BASE + stem.removeprefix(base)
        wrapper = next((one for one in _WRAPPERS if stem.startswith(one)), None)
        if wrapper is None:
            return
        stem = stem.removeprefix(wrapper)


class _RenamedCheckpoint:
    """A `Checkpoint`. renamed: its name → the model's."""

    def __init__(self, checkpoint: Checkpoint, renamed: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._renamed = renamed
        self._own = {ours: theirs for theirs, ours in renamed.items()}
        self.shapes = {renamed.get(name, name): shape for name, shape in checkpoint.shapes.items()}

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._checkpoint.stream({self._own.get(name, name) for name in names}):
            yield self._renamed.get(name, name), tensor

"""Files of torch.save that older checkpoints come in. Only tensors are read from them, so they cannot run code."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from compile_and_serve.runtime.weights.errors import WeightError

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


class PickledCheckpoint:
    """A `Checkpoint` in files of torch.save. files: each with the names to read from it; None: all."""

    def __init__(self, files: Mapping[Path, list[str] | None]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file, names in files.items():
            held = _load(file)
            lacking = sorted(set(names) - held.keys()) if names is not None else []
            if lacking:
                raise WeightError(f"{file} lacks {lacking[0]}, although {PICKLED_INDEX} lists it there: download it again.")
            self._tensors |= held if names is None else {name: held[name] for name in names}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            if name in names:
                yield name, tensor


def _load(file: Path) -> dict[str, torch.Tensor]:
    """The file's tensors. They are mapped into memory, except those of torch before 1.6."""
    try:
        try:
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            held = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightError(f"{file} is not a file of plain tensors ({reason:.200}): convert it to model.safetensors.") from None
    if not isinstance(held, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in held.values()):
        raise WeightError(f"{file} must hold tensors by name: convert it to model.safetensors.")
    return dict(held)

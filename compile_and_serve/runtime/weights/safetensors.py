"""Folders of safetensors: `model.safetensors`, or shards that `model.safetensors.index.json` names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from compile_and_serve.runtime.weights.errors import WeightError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A `Checkpoint` whose tensors are views of memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[Path, list[str]] = {}
        wanted = _shards(folder)
        for file, names in wanted.items():
            with _open(file) as shard:
                held = list(shard.keys())
                lacking = sorted(set(names) - set(held)) if names is not None else []
                if lacking:
                    raise WeightError(f"{file} lacks {lacking[0]}, although {INDEX_FILE} lists it there: download it again.")
                self._files[file] = held if names is None else names
                for name in self._files[file]:
                    self.shapes[name] = tuple(shard.get_slice(name).get_shape())

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for file, held in self._files.items():
            with _open(file) as shard:
                for name in held:
                    if name in names:
                        yield name, shard.get_tensor(name)


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """File → names of its tensors according to the index; None without an index."""
    index_file = folder / INDEX_FILE
    if not index_file.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise WeightError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: add the model's weights.")
        return {single: None}
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, []).append(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise WeightError(f'{index_file} must be a JSON object with a "weight_map" from tensor name to file: download it again.') from None
    absent = sorted(file for file in by_file if not (folder / file).exists())
    if absent:
        raise WeightError(f"{INDEX_FILE} names {absent[0]}, which is not in {folder}: download the missing files.")
    return {folder / file: names for file, names in sorted(by_file.items())}


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise WeightError(f"{file} is truncated or not a safetensors file ({error}): download it again.") from None

"""Folders of safetensors: `model.safetensors`, shards that `model.safetensors.index.json` names, or files of other names.

Older folders have files of torch.save instead (`pickled.py`), with an index of the same form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.pickled import PICKLED_FILE, PICKLED_INDEX, PickledCheckpoint

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Other tensors than the model's under Hugging Face's names: Mistral's own format, adapters, optimizer states.
_OTHER_FILES = ("consolidated", "adapter_", "optimizer", "medusa")


def open_folder(folder: Path, wanted: Callable[[str], bool] | None = None) -> SafetensorsCheckpoint | PickledCheckpoint:
    """The tensors of a model's folder. wanted: which names; the others need not be read. Raises `WeightError`."""
    files = _files(folder)
    if wanted is not None:
        named = {file: names if names is None else [name for name in names if wanted(name)] for file, names in files.items()}
        files = {file: names for file, names in named.items() if names != []}
    if any(file.suffix == ".safetensors" for file in files) or not files:
        return SafetensorsCheckpoint(files)
    return PickledCheckpoint(files)


class SafetensorsCheckpoint:
    """A `Checkpoint` whose tensors are views of memory-mapped files. files: each with the names to read from it; None: all."""

    def __init__(self, files: Mapping[Path, list[str] | None]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[Path, list[str]] = {}
        for file, names in files.items():
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


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """File → names of its tensors according to an index; None without an index."""
    if (folder / INDEX_FILE).exists():
        return _shards(folder / INDEX_FILE)
    if (folder / SINGLE_FILE).exists():
        return {folder / SINGLE_FILE: None}
    others = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith(_OTHER_FILES)]
    if others:
        return dict.fromkeys(others)
    if (folder / PICKLED_INDEX).exists():
        return _shards(folder / PICKLED_INDEX)
    if (folder / PICKLED_FILE).exists():
        return {folder / PICKLED_FILE: None}
    raise WeightError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} nor {PICKLED_FILE}: add the model's weights.")


def _shards(index_file: Path) -> dict[Path, list[str] | None]:
    folder = index_file.parent
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, []).append(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise WeightError(f'{index_file} must be a JSON object with a "weight_map" from tensor name to file: download it again.') from None
    absent = sorted(file for file in by_file if not (folder / file).exists())
    if absent:
        raise WeightError(f"{index_file.name} names {absent[0]}, which is not in {folder}: download the missing files.")
    return {folder / file: names for file, names in sorted(by_file.items())}


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise WeightError(f"{file} is truncated or not a safetensors file ({error}): download it again.") from None

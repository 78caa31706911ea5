"""`Checkpoint`: tensors on disk under Hugging Face's names, in any file format, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compile_and_serve.models.architecture import with_architecture
from compile_and_serve.runtime.weights.facts_of_tensors import with_facts_of_tensors
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from compile_and_serve.runtime.weights.gguf import GgufCheckpoint
from compile_and_serve.runtime.weights.gguf_config import read_gguf_config
from compile_and_serve.runtime.weights.overrides import overridden
from compile_and_serve.runtime.weights.safetensors import open_folder

if TYPE_CHECKING:
    from compile_and_serve.runtime.config import ModelConfig


class Checkpoint(Protocol):
    """Named tensors on disk."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape, known before any data is read, so that a wrong checkpoint fails early."""
        ...

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor) of each of `names`, in the file's order. Only a few tensors are in memory at once."""
        ...


def open_checkpoint(path: Path, packed: frozenset[str] = frozenset()) -> Checkpoint:
    """Open a .gguf file or a folder of tensors. packed: names of a .gguf file's tensors to read as blocks of bytes.

    Raises `WeightError` if files are missing, truncated or malformed.
    """
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, packed)
    return open_folder(path)


def iter_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of a checkpoint. GGUF tensors are dequantized to float32."""
    checkpoint = open_checkpoint(path)
    yield from checkpoint.stream(set(checkpoint.shapes))


def read_config(path: Path, *, is_whole: bool = True) -> dict[str, Any]:
    """The model's config in the format of Hugging Face's config.json, from a folder or a GGUF file's metadata.

    Where the folder's tensors say otherwise, they are believed (`facts_of_tensors.py`). is_whole: the model has all of its tensors, unlike
    a drafter, which may take some from its target. Raises `WeightError` if there is no config, or if it is not a JSON object.
    """
    if path.suffix == ".gguf":
        return read_gguf_config(path)
    return with_facts_of_tensors(with_architecture(read_folder_config(path)), path, is_whole=is_whole)


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """The config of the model that an engine's options name, with the fields that they replace. Raises as `read_config` does."""
    config = overridden(read_config(model.path), model.hf_overrides or {})
    if model.mm_processor_kwargs:
        config["image_processor"] = {**(config.get("image_processor") or {}), **model.mm_processor_kwargs}
    return config

"""`Checkpoint`: tensors on disk under Hugging Face's names, in any file format, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.gguf import GgufCheckpoint, read_gguf_config
from compile_and_serve.runtime.weights.overrides import overridden
from compile_and_serve.runtime.weights.safetensors import SafetensorsCheckpoint

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
    """Open a .gguf file or a folder of safetensors. packed: names of a .gguf file's tensors to read as blocks of bytes.

    Raises `WeightError` if files are missing, truncated or malformed.
    """
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, packed)
    return SafetensorsCheckpoint(path)


def iter_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of a checkpoint. GGUF tensors are dequantized to float32."""
    checkpoint = open_checkpoint(path)
    yield from checkpoint.stream(set(checkpoint.shapes))


def read_config(path: Path) -> dict[str, Any]:
    """The model's config in the format of Hugging Face's config.json, from a folder or a GGUF file's metadata.

    Raises `WeightError` if there is none, or if it is not a JSON object.
    """
    if path.suffix == ".gguf":
        return read_gguf_config(path)
    file = path / "config.json"
    if not file.is_file():
        raise WeightError(f"{path} has no config.json: expected a model folder in Hugging Face layout.")
    config = _read_object(file)
    modelopt = path / "hf_quant_config.json"  # older files of ModelOpt
    if "quantization_config" not in config and modelopt.is_file():
        settings = _read_object(modelopt).get("quantization") or {}
        if not isinstance(settings, dict):
            raise WeightError(f"quantization in {modelopt} must be a JSON object, got a {type(settings).__name__}.")
        config["quantization_config"] = {"quant_method": "modelopt", **settings}
    return config


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """The config of the model that an engine's options name, with the fields that they replace. Raises as `read_config` does."""
    return overridden(read_config(model.path), model.hf_overrides or {})


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightError(f"{file} is not valid JSON ({error}): check that the file is complete.") from None
    if not isinstance(found, dict):
        raise WeightError(f"{file} must hold a JSON object, got a {type(found).__name__}.")
    return found

"""The Dense modules of sentence-transformers: linears, each with an activation, that turn pooled rows into embeddings.

Shape legend: F rows, D features before a linear, O features after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.runtime.config import ModelConfig
from compile_and_serve.runtime.pooling.files import PoolingFilesError, modules_of

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "GELU": F.gelu,
    "ReLU": F.relu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Projection:
    """activation(x Wᵀ + b): float32 [F, D] → [F, O]."""

    weight_OD: torch.Tensor
    bias_O: torch.Tensor | None
    activation: str

    def to(self, device: torch.device) -> Projection:
        bias = None if self.bias_O is None else self.bias_O.to(device)
        return Projection(self.weight_OD.to(device), bias, self.activation)

    def __call__(self, x_FD: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self.activation](F.linear(x_FD, self.weight_OD, self.bias_O))


def projections_of(model: ModelConfig) -> list[Projection]:
    """The checkpoint's, in order. Raises `PoolingFilesError`."""
    return [_read(folder) for name, folder in modules_of(model) if name == "Dense"]


def output_width(model: ModelConfig, width: int) -> int:
    """Features of an embedding, of `width` before the projections."""
    folders = [folder for name, folder in modules_of(model) if name == "Dense"]
    return int(_config(folders[-1])["out_features"]) if folders else width


def _config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        activation = str(content.get("activation_function", "Tanh")).rpartition(".")[2]
        return {**content, "activation": activation, "out_features": int(content["out_features"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PoolingFilesError(f"{folder / 'config.json'} describes no Dense module ({error}): check the download.") from error


def _read(folder: Path) -> Projection:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    activation = str(_config(folder)["activation"])
    if activation not in _ACTIVATIONS:
        raise PoolingFilesError(f"{folder} has the activation {activation!r:.100}, but only {', '.join(_ACTIVATIONS)} are supported.")
    file = folder / "model.safetensors"
    try:
        tensors = {name.rpartition(".")[2]: tensor.float() for name, tensor in load_file(file).items()}
        return Projection(tensors["weight"], tensors.get("bias"), activation)
    except (OSError, SafetensorError, KeyError) as error:
        raise PoolingFilesError(f"{file} does not hold the Dense module's weight ({error}): check the download.") from error

"""Find a model's files, read safetensors and GGUF, make random weights, and load them into a compiled model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.resolve import KNOWN_MODELS, resolve_model, user_cache_dir

if TYPE_CHECKING:
    from compile_and_serve.runtime.weights.checkpoint import iter_tensors, open_checkpoint, read_config, read_model_config
    from compile_and_serve.runtime.weights.loader import LoadReport, load_weights

__all__ = [
    "KNOWN_MODELS",
    "LoadReport",
    "WeightError",
    "iter_tensors",
    "load_weights",
    "open_checkpoint",
    "read_config",
    "read_model_config",
    "resolve_model",
    "user_cache_dir",
]

_MODULES = {
    "LoadReport": "loader",
    "iter_tensors": "checkpoint",
    "load_weights": "loader",
    "open_checkpoint": "checkpoint",
    "read_config": "checkpoint",
    "read_model_config": "checkpoint",
}


def __getattr__(name: str) -> Any:
    # Lazy, because a process that only finds the model's files should not import torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

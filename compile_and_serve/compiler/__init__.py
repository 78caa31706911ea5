"""The compiler: capture, passes, split, one compilation per distinct piece, artifacts. Entry point: `compile_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_and_serve.compiler.config import CompileConfig
    from compile_and_serve.compiler.model import CompiledModel, EagerModel, Model
    from compile_and_serve.compiler.pipeline import compile_model
    from compile_and_serve.compiler.rewrite.available_kernels import available_kernels

__all__ = ["CompileConfig", "CompiledModel", "EagerModel", "Model", "available_kernels", "compile_model"]

_MODULES = {
    "CompileConfig": "config",
    "CompiledModel": "model",
    "EagerModel": "model",
    "Model": "model",
    "available_kernels": "rewrite.available_kernels",
    "compile_model": "pipeline",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that a process that only reads options (`compiler/config.py`) does not import torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

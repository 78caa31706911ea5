"""The compiler: capture, passes, split, one compilation a distinct piece, artifacts. Entry point: `compile_model`."""

from __future__ import annotations

from compiler.config import CompileConfig
from compiler.kernels import available_kernels
from compiler.model import CompiledModel, EagerModel, Model
from compiler.pipeline import compile_model

__all__ = ["CompileConfig", "CompiledModel", "EagerModel", "Model", "available_kernels", "compile_model"]

"""Functions that make a weight of a checkpoint's tensors, by name, and the expressions that call them.

An expression is data, so that artifacts can store it. Its functions are registered here; `compiler/weights/transforms.py` evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from compile_and_serve.custom_ops.mesh import Axis


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Text:
    """A text as a constant of an expression, where a bare string is the name of a tensor."""

    text: str


Constant = int | torch.dtype | Text | None
# The name of a source, a constant, or (function name, *expressions). `Any` stands for Expression, which mypy cannot nest.
Expression = str | Constant | tuple[Any, ...]
Selects = Literal["rows", "columns", "experts"]
_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFunction:
    """A registered function; see `weight_function`."""

    call: Callable[..., torch.Tensor]
    axis: Axis | None
    selects: Selects | None


# Filled when modules are imported.
WEIGHT_FUNCTIONS: dict[str, WeightFunction] = {}


def weight_function(name: str, *, axis: Axis | None = None, selects: Selects | None = None) -> Callable[[_Function], _Function]:
    """Register a function of tensors and constants under a name, for expressions. Artifacts use the name: change it with the result.

    axis: the function takes a keyword `rank`, along this axis of the mesh, and selects the part of one tensor that this rank needs. The
        shape and dtype of the result do not depend on the rank. None: all ranks have the same result.
    selects: the function concatenates tensors or takes slices along the rows [..., O, I] or along the columns, or takes some of
        stacked experts [X, …], and does nothing else.
        It must treat any sizes of the other dimensions alike, so that it can be applied to the scales of a quantized weight, too.
    """

    def register(fn: _Function) -> _Function:
        assert name not in WEIGHT_FUNCTIONS, f"weight function {name} is registered twice"
        WEIGHT_FUNCTIONS[name] = WeightFunction(call=fn, axis=axis, selects=selects)
        return fn

    return register


def expression_to_json(expression: Expression) -> Any:
    """The expression as plain data for json.dump."""
    if isinstance(expression, tuple):
        return [expression_to_json(part) for part in expression]
    if isinstance(expression, torch.dtype):
        return {"dtype": str(expression).removeprefix("torch.")}
    return {"text": expression.text} if isinstance(expression, Text) else expression


def expression_from_json(data: Any) -> Expression:
    """The inverse of `expression_to_json`."""
    if isinstance(data, list):
        return tuple(expression_from_json(part) for part in data)
    if isinstance(data, dict):
        return Text(data["text"]) if "text" in data else getattr(torch, data["dtype"])
    return data

"""Quantizing a weight that is an expression: its values and its scales are expressions again.

A scale is made of a whole checkpoint tensor, or comes with it, and then follows what becomes of the tensor. With Q the values and
S the scales of an expression,

    Q(w) = quantize(w, S(w))                S(w) = row_scales(w)            a tensor of the checkpoint
    Q(dequantize(q, s)) = q                 S(dequantize(q, s)) = s         one that the checkpoint holds quantized
    Q(f(a, b)) = f(Q(a), Q(b))              S(f(a, b)) = f(S(a), S(b))      f joins or takes out rows
    Q(g(a)) = g(Q(a))                       S(g(a)) = S(a)                  g takes out columns; scales per row
                                            S(g(a)) = g(S(a))               the same; scales per block

so that a merged or sharded weight has exactly the values that its parts would have alone. What f and g may be is what
`weight_function` was told (`selects`). Blocks must not be cut: where scales are per block, every f and g works on whole ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeGuard

import torch

from compile_and_serve.compiler.weights.transforms import (
    Expression,
    TensorSpec,
    expression_spec,
    is_selection,
    selected_dimension,
    weight_function,
)
from compile_and_serve.custom_ops.quantization import (
    BLOCK,
    LARGEST,
    Activations,
    QuantizedWeight,
    block_scales,
    dequantize_weight,
    quantize_weight,
    row_scales,
)
from compile_and_serve.custom_ops.quantized.quantized_linear import pack_quantized_weight

Scales = Literal["row", "block"]


class CannotQuantizeError(Exception):
    """Why an expression has no quantized form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedExpression:
    """values: of `dtype` [O, I]. scale: float32 [O], or [ceil(O / 128), ceil(I / 128)]. input_scale: float32 [1], or None."""

    values: Expression
    scale: Expression
    dtype: torch.dtype
    activations: Activations
    input_scale: Expression | None = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


for _dtype in LARGEST:
    weight_function(f"row_scales.{_name(_dtype)}")(partial(row_scales, dtype=_dtype))
    weight_function(f"block_scales.{_name(_dtype)}")(partial(block_scales, dtype=_dtype))
    weight_function(f"quantize.{_name(_dtype)}")(partial(quantize_weight, dtype=_dtype))
for _dtype in (torch.bfloat16, torch.float16, torch.float32):
    weight_function(f"dequantize.{_name(_dtype)}")(partial(dequantize_weight, dtype=_dtype))
weight_function("pack_quantized_weight")(pack_quantized_weight)


@weight_function("scale_to_rows")
def _scale_to_rows(scale: torch.Tensor, quantized_OI: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scale of a tensor [1] or of its rows [O, 1] as one a row. → float32 [O]"""
    return scale.float().reshape(-1).expand(quantized_OI.shape[0]).contiguous()


@weight_function("largest_scale")
def _largest_scale(*scales: torch.Tensor) -> torch.Tensor:
    """The scale under which no part of a merged input saturates. → float32 [1]"""
    return torch.stack([scale.float().reshape(1) for scale in scales]).amax(0)


def checkpoint_specs(
    specs: Mapping[str, TensorSpec], quantized: Mapping[str, QuantizedWeight]
) -> dict[str, TensorSpec]:
    """What a checkpoint must hold: the parameters, those of `quantized` in their own dtype and with what belongs to them."""
    sources = dict(specs)
    for name, stored in quantized.items():
        sources[name] = TensorSpec(shape=specs[name].shape, dtype=stored.dtype)
        sources[stored.scale] = TensorSpec(shape=stored.scale_shape, dtype=torch.float32)
        if stored.input_scale is not None:
            sources[stored.input_scale] = TensorSpec(shape=(1,), dtype=torch.float32)
    return sources


def plain_expressions(
    specs: Mapping[str, TensorSpec], quantized: Mapping[str, QuantizedWeight]
) -> dict[str, Expression]:
    """Each parameter as the plain model wants it: its name, or for one that the checkpoint holds quantized the exact product."""
    expressions: dict[str, Expression] = {name: name for name in specs}
    for name, stored in quantized.items():
        scale: Expression = stored.scale if stored.per_block else ("scale_to_rows", stored.scale, name)
        expressions[name] = (f"dequantize.{_name(specs[name].dtype)}", name, scale)
    return expressions


def leaves(expression: Expression) -> list[Expression]:
    """The parts of an expression that stand for one parameter each, in order: names, and what `plain_expressions` made of them."""
    if isinstance(expression, str) or _is_dequantized(expression):
        return [expression]
    assert isinstance(expression, tuple)
    return [leaf for argument in expression[1:] if not isinstance(argument, int) for leaf in leaves(argument)]


def parameter_of(leaf: Expression) -> str:
    """The parameter that one of `leaves` stands for."""
    name = leaf[1] if isinstance(leaf, tuple) else leaf
    assert isinstance(name, str)
    return name


def quantized_expression(
    expression: Expression, sources: Mapping[str, TensorSpec], quantized: Mapping[str, QuantizedWeight], *,
    dtype: torch.dtype | None = None, scales: Scales = "row", activations: Activations = "none",
) -> QuantizedExpression:  # fmt: skip
    """Q, S and the input's scale of an expression.

    dtype, scales, activations: what the weights are quantized to; dtype None: as the checkpoint (`quantized`) holds them.
    Raises `CannotQuantizeError`.
    """
    names = [parameter_of(leaf) for leaf in leaves(expression)]
    stored = [quantized[name] for name in names if name in quantized]
    if dtype is None:
        if len(stored) < len(names):
            raise CannotQuantizeError("the checkpoint holds only a part of the merged weight quantized")
        if len({(s.dtype, s.activations, s.per_block) for s in stored}) > 1:
            raise CannotQuantizeError("the checkpoint holds the parts of the merged weight quantized in different ways")
        dtype, activations = stored[0].dtype, stored[0].activations
    values, scale = _quantize(expression, sources, dtype, scales)
    input_scales = [s.input_scale for s in stored if s.input_scale is not None]
    return QuantizedExpression(
        values=values,
        scale=scale,
        dtype=dtype,
        activations=activations,
        input_scale=("largest_scale", *input_scales) if input_scales else None,
    )


def _is_dequantized(expression: Expression) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(expression, tuple) and str(expression[0]).startswith("dequantize.")


def _takes_rows(expression: Expression) -> bool:
    """A rank's rows of a checkpoint's tensor: their scales are the same as in the whole one, of which nothing else is then read."""
    return is_selection(expression) and selected_dimension(expression[0]) == 0


def _quantize(
    expression: Expression, sources: Mapping[str, TensorSpec], dtype: torch.dtype, scales: Scales
) -> tuple[Expression, Expression]:
    if isinstance(expression, str) or (scales == "row" and _takes_rows(expression)):
        scale = (f"{scales}_scales.{_name(dtype)}", expression)
        return (f"quantize.{_name(dtype)}", expression, scale), scale
    if _is_dequantized(expression):
        return expression[1], expression[2]
    assert isinstance(expression, tuple), "a constant has no quantized form"
    function, *arguments = expression
    dimension = selected_dimension(function)
    if dimension is None:
        raise CannotQuantizeError(f"the weight is computed by {function}, which scales cannot follow")
    parts: list[Any] = [
        argument if isinstance(argument, int) else _quantize(argument, sources, dtype, scales) for argument in arguments
    ]
    values = (function, *(part if isinstance(part, int) else part[0] for part in parts))
    part_scales: list[Any] = [part if isinstance(part, int) else part[1] for part in parts]
    per_block = len(_spec(part_scales[0], sources).shape) == 2
    if not per_block and dimension == 1:
        return values, part_scales[0]
    if per_block:
        _require_whole_blocks(expression, dimension, sources)
    return values, (function, *part_scales)


def _require_whole_blocks(expression: tuple[Any, ...], dimension: int, sources: Mapping[str, TensorSpec]) -> None:
    """Every tensor but the last that is joined, and every slice that is taken out, ends where a block ends."""
    tensors = [argument for argument in expression[1:] if not isinstance(argument, int)]
    for part in tensors[:-1] if len(tensors) > 1 else [expression]:
        size = _spec(part, sources).shape[dimension]
        if size % BLOCK:
            what = "rows" if dimension == 0 else "columns"
            raise CannotQuantizeError(f"scales are per block of {BLOCK}, and a part of the weight has {size} {what}")


def _spec(expression: Expression, sources: Mapping[str, TensorSpec]) -> TensorSpec:
    return expression_spec(expression, sources, torch.device("cpu"))

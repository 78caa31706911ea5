"""Quantizes weights that are expressions: their values and their scales are expressions, too.

The scales of a checkpoint's tensor are computed from the whole tensor or stored with it. What an expression does with the tensor, it
does with the scales. With Q the values and S the scales of an expression,

    Q(w) = quantize(w, S(w))                S(w) = row_scales(w)            a tensor of the checkpoint
    Q(dequantize(q, s)) = q                 S(dequantize(q, s)) = s         a quantized tensor of the checkpoint
    Q(f(a, b)) = f(Q(a), Q(b))              S(f(a, b)) = f(S(a), S(b))      f concatenates or selects rows
    Q(g(a)) = g(Q(a))                       S(g(a)) = S(a)                  g selects columns, scales per row
                                            S(g(a)) = g(S(a))               g selects columns, scales per block

so a merged or sharded weight has exactly the values that its parts would have separately. f and g are weight functions that are
registered with `selects`. With scales per block, they must not divide a block. Stacked weights of experts [X, O, I] are alike.

Weights with scales per group of inputs (`GroupedParts`) have codes, scales and offsets. f applies to all three, g to codes, and to
scales and offsets, whose groups are divided where a slice would divide one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, Literal

import torch

from compile_and_serve.compiler.weights.transforms import WeightTable, expression_spec, is_selection
from compile_and_serve.custom_ops.quantization import BLOCK, Activations
from compile_and_serve.custom_ops.quantized.group_layout import PADDED_GROUP, padded_width
from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK
from compile_and_serve.custom_ops.stored_weight import GroupedParts, Mxfp4Parts, Parts, ScaledParts
from compile_and_serve.custom_ops.weight_functions import WEIGHT_FUNCTIONS, Constant, Expression, Selects, weight_function

Scales = Literal["row", "block"]


class CannotQuantizeError(Exception):
    """The expression cannot be quantized. The message says why."""


@weight_function("input_order")
def _input_order(*input_groups: torch.Tensor) -> torch.Tensor:
    """The columns in the order of their groups. The parts of a merged weight must agree. int32 [I] each → int64 [I]"""
    first = input_groups[0]
    is_real = type(first) is torch.Tensor  # not a tensor without data, of which only the shape is asked
    if is_real and not all(torch.equal(first, other) for other in input_groups[1:]):
        raise ValueError("Merged linears have different orders of their inputs (g_idx): compile with --disable-pass merge_linears.")
    return torch.argsort(first.long(), stable=True)


@weight_function("add_to_codes")
def _add_to_codes(codes_OI: torch.Tensor, difference: int) -> torch.Tensor:
    return codes_OI + difference


@weight_function("take_columns")
def _take_columns(codes_OI: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor:
    return codes_OI[:, order_I]


@weight_function("divide_groups")
def _divide_groups(scale_OG: torch.Tensor, parts: int) -> torch.Tensor:
    """Each group as `parts` equal groups. [..., G] → [..., G · parts]"""
    return scale_OG.repeat_interleave(parts, -1)


@weight_function("largest_scale")
def _largest_scale(*scales: torch.Tensor) -> torch.Tensor:
    """The scale with which no part of a merged input saturates. → float32 [1]"""
    return torch.stack([scale.float().reshape(1) for scale in scales]).amax(0)


def quantized_parts(
    expression: Expression, weights: WeightTable, dtype: torch.dtype, scales: Scales, activations: Activations = "none"
) -> ScaledParts:
    """The form of an expression that is quantized to `dtype` while it is loaded. Raises `CannotQuantizeError`."""

    def of_leaf(leaf: Expression) -> ScaledParts | None:
        # The scales of a rank's rows or experts need no others, so only they are read.
        undivided = ("rows", "experts") if scales == "row" else ("experts",)
        if weights.parameter_of(leaf) is None and not (is_selection(leaf) and _selects(leaf[0]) in undivided):
            return None
        scale = (f"{scales}_scales", leaf, dtype)
        values = ("quantize", leaf, scale, dtype)
        return ScaledParts(values=values, scale=scale, dtype=dtype, per_block=scales == "block", activations=activations)

    parts = _parts(expression, weights, of_leaf)
    assert isinstance(parts, ScaledParts)
    return parts


def grouped_parts(expression: Expression, weights: WeightTable, bits: int, group_size: int) -> GroupedParts:
    """The form of an expression that is quantized in groups of inputs while it is loaded. Raises `CannotQuantizeError`."""

    def of_leaf(leaf: Expression) -> GroupedParts | None:
        if weights.parameter_of(leaf) is None and not (is_selection(leaf) and _selects(leaf[0]) in ("rows", "experts")):
            return None
        scale = ("group_scales", leaf, bits, group_size)
        offset = ("group_minima", leaf, bits, group_size)
        codes = ("quantize_groups", leaf, scale, offset, bits, group_size)
        return GroupedParts(codes=codes, scale=scale, bits=bits, group_size=group_size, offset=offset)

    parts = _parts(expression, weights, of_leaf)
    assert isinstance(parts, GroupedParts)
    return parts


def stored_parts(expression: Expression, weights: WeightTable, *, is_compact: bool = False) -> Parts:
    """The form of an expression over weights that the checkpoint holds quantized. Raises `CannotQuantizeError`.

    is_compact: with factors, and codes of 5 and 6 bits where the checkpoint has such, which kernels of experts take.
    """
    stored = [weights.stored.get(name) for name in weights.parameters(expression)]
    found = [one.parts for one in stored if one is not None and one.parts is not None]
    if len(found) < len(stored):
        if any(one is not None and one.is_quantized and one.parts is None for one in stored):
            raise CannotQuantizeError("no kernel takes it as the checkpoint holds it: it is dequantized")
        raise CannotQuantizeError("only a part of the merged weight is quantized in the checkpoint")
    if len({one.layout for one in found}) > 1:
        raise CannotQuantizeError("the parts of the merged weight are quantized to different formats in the checkpoint")

    def of_leaf(leaf: Expression) -> Parts | None:
        name = weights.parameter_of(leaf)
        return None if name is None else weights.stored[name].parts

    parts = _parts(expression, weights, of_leaf)
    if isinstance(parts, ScaledParts):
        inputs = dict.fromkeys(one.input_scale for one in found if isinstance(one, ScaledParts) and one.input_scale is not None)
        return replace(parts, input_scale=("largest_scale", *inputs) if inputs else None)
    if not isinstance(parts, GroupedParts):
        return parts
    if not is_compact:
        parts = parts.without_factors()
        if parts.table == "iq4_nl":
            parts = replace(parts, codes=("iq4_nl_bytes", parts.codes), bits=8, table="")
    bits = parts.compact_bits if is_compact else parts.container_bits
    width = None if parts.input_order is None else _shape(parts.input_order, weights)[0]
    missing = (1 << (bits - 1)) - (1 << (parts.bits - 1))
    if missing and parts.offset is None and not parts.table:  # kernels take the zero point from the container's bits
        parts = replace(parts, codes=("add_to_codes", parts.codes, missing))
    parts = replace(parts, bits=bits, width=width)
    if parts.input_groups is None:
        return parts
    order = ("input_order", *dict.fromkeys(one.input_groups for one in found if isinstance(one, GroupedParts)))
    return replace(parts, codes=("take_columns", parts.codes, order), input_order=order)


def _parts(expression: Expression, weights: WeightTable, of_leaf: Callable[[Expression], Parts | None]) -> Parts:
    """of_leaf: the form of a parameter, or of another expression that is not to be divided; None: it is made of such expressions."""
    if (leaf := of_leaf(expression)) is not None:
        return leaf
    assert isinstance(expression, tuple), "a constant has no quantized form"
    function, *arguments = expression
    selects = _selects(function)
    if selects is None:
        raise CannotQuantizeError(f"the weight is computed by {function}, which cannot be applied to its scales")
    parts = [argument if isinstance(argument, Constant) else _parts(argument, weights, of_leaf) for argument in arguments]
    first = parts[0]

    def of(field: str) -> Any:
        if getattr(first, field) is None:
            return None
        return (function, *(part if isinstance(part, Constant) else getattr(part, field) for part in parts))

    if isinstance(first, GroupedParts):
        if selects == "columns":
            return _grouped_columns(first, function, arguments[1:], of, weights)
        if len({part.input_order for part in parts if isinstance(part, GroupedParts)}) > 1:
            raise CannotQuantizeError("merged linears have different orders of their inputs (act-order)")
        fields = ("codes", "scale", "offset", "scale_factor", "offset_factor", "plain_scale")
        return replace(first, **{name: of(name) for name in fields})
    if isinstance(first, Mxfp4Parts):
        if selects == "columns":
            _require_whole_blocks([expression], selects, MX_BLOCK, weights)
        return replace(first, codes=of("codes"), scale=of("scale"))
    assert isinstance(first, ScaledParts)
    if first.per_block and selects != "experts":
        tensors = [argument for argument in arguments if not isinstance(argument, Constant)]
        _require_whole_blocks(tensors[:-1] if len(tensors) > 1 else [*tensors, expression], selects, BLOCK, weights)
    keeps_scale = selects == "columns" and not first.per_block
    return replace(first, values=of("values"), scale=first.scale if keeps_scale else of("scale"))


def _grouped_columns(
    whole: GroupedParts, function: str, sizes: Sequence[Any], of: Callable[[str], Any], weights: WeightTable
) -> GroupedParts:
    """A slice of the inputs of a weight with groups."""
    codes = of("codes")
    if whole.input_groups is not None:
        return _padded(whole, function, sizes, codes, weights)
    width = _shape(codes, weights)[-1]
    if _shape(whole.scale, weights)[-1] == 1:
        return replace(whole, codes=codes)
    size = gcd(width, whole.group_size)
    if size < whole.group_size and size % 32:
        raise CannotQuantizeError(f"a rank has {width} inputs, which divide groups of {whole.group_size} too finely")
    groups = _shape(whole.scale, weights)[-1]
    taken: dict[str, Any] = {}
    for name in ("scale", "offset", "plain_scale", "scale_factor", "offset_factor"):
        one = getattr(whole, name)
        if one is None or (count := _shape(one, weights)[-1]) == 1:  # a factor of the whole row
            continue
        span = whole.group_size * (groups // count)
        parts = span // gcd(width, span)
        taken[name] = (function, one if parts == 1 else ("divide_groups", one, parts), *sizes)
    return replace(whole, codes=codes, group_size=size, **taken)


def _padded(whole: GroupedParts, function: str, sizes: Sequence[Any], codes: Expression, weights: WeightTable) -> GroupedParts:
    """A rank's inputs of a weight with act-order. It has some inputs of each group, so groups are filled up with columns of zeros."""
    if function != "shard_columns" or whole.input_order is not None:
        raise CannotQuantizeError(f"its inputs are selected by {function}, and their groups are not adjacent (act-order)")
    (size,) = sizes
    mine = ("shard_rows", whole.input_groups, size, size)
    groups = _shape(whole.scale, weights)[1]
    order = ("padded_order", mine, groups, padded_width(_shape(codes, weights)[1], groups))
    return replace(
        whole,
        codes=("padded_columns", codes, order),
        scale=("padded_scales", whole.scale, mine, order),
        offset=None if whole.offset is None else ("padded_scales", whole.offset, mine, order),
        group_size=PADDED_GROUP,
        input_groups=None,
        input_order=order,
    )


def _require_whole_blocks(tensors: Sequence[Expression], selects: Selects, block: int, weights: WeightTable) -> None:
    """Check that these end at the end of a block: a sliced tensor and its slice, or every concatenated tensor but the last.

    block: rows or columns that share a scale.
    """
    for tensor in tensors:
        *experts, _, _ = shape = _shape(tensor, weights)
        size = shape[-2] if selects == "rows" else shape[-1]
        if size % (2 * block if experts and selects == "rows" else block):  # of experts, gate and up are sliced alike
            raise CannotQuantizeError(f"scales are per block of {block}, and a part of the weight has {size} {selects}")


def _selects(function: str) -> Selects | None:
    return WEIGHT_FUNCTIONS[function].selects


def _shape(expression: Expression, weights: WeightTable) -> tuple[int, ...]:
    return expression_spec(expression, weights.sources, torch.device("cpu")).shape

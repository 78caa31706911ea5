"""Quantizes weights that are expressions: their values and their scales are expressions, too.

The scales of a checkpoint's tensor are computed from the whole tensor or stored with it. What an expression does with the tensor, it
does with the scales. With Q the values and S the scales of an expression,

    Q(w) = quantize(w, S(w))                S(w) = row_scales(w)            a tensor of the checkpoint
    Q(dequantize(q, s)) = q                 S(dequantize(q, s)) = s         a quantized tensor of the checkpoint
    Q(f(a, b)) = f(Q(a), Q(b))              S(f(a, b)) = f(S(a), S(b))      f concatenates or selects rows
    Q(g(a)) = g(Q(a))                       S(g(a)) = S(a)                  g selects columns, scales per row
                                            S(g(a)) = g(S(a))               g selects columns, scales per block

so a merged or sharded weight has exactly the values that its parts would have separately. f and g are weight functions that are
registered with `selects`. With scales per block, they must not divide a block.

Weights with scales per group of inputs (`GroupedWeight`) have codes, scales and offsets. f applies to all three, g to codes, and to
scales and offsets, whose groups are divided where a slice would divide one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
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
    ArrangedWeight,
    GroupedWeight,
    Mxfp4Weight,
    QuantizedWeight,
    StoredWeight,
    block_scales,
    dequantize_experts,
    dequantize_weight,
    dtype_name,
    quantize_weight,
    row_scales,
)
from compile_and_serve.custom_ops.quantized import group_formats
from compile_and_serve.custom_ops.quantized.gguf_formats import GGUF_FORMATS, GgufFormat
from compile_and_serve.custom_ops.quantized.group_layout import (
    PADDED_GROUP,
    TABLES,
    dequantize_groups,
    is_column,
    padded_columns,
    padded_order,
    padded_scales,
    padded_width,
    real_columns,
)
from compile_and_serve.custom_ops.quantized.group_linear import pack_group_codes, pack_group_scales
from compile_and_serve.custom_ops.quantized.mxfp4 import deinterleave_rows, dequantize_mxfp4, swap_inputs_and_outputs
from compile_and_serve.custom_ops.quantized.quantized_linear import pack_quantized_weight

Scales = Literal["row", "block"]


class CannotQuantizeError(Exception):
    """The expression cannot be quantized. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedExpression:
    """The quantized form of an expression.

    values: `dtype` [O, I]. scale: float32 [O], or [ceil(O / 128), ceil(I / 128)] per block. input_scale: float32 [1], or None.
    """

    values: Expression
    scale: Expression
    dtype: torch.dtype
    activations: Activations
    input_scale: Expression | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedExpression:
    """The form of an expression over group-quantized weights.

    codes: uint8 [O, I]. scale, offset: [O, G], as in `GroupedWeight`. input_order: int64 [I], the order of x's columns in which groups
    are adjacent; None: as they are. width: if not None, the columns of the codes; those with the index I in the order are zeros.
    table, activations: as in `GroupedWeight`.
    """

    codes: Expression
    scale: Expression
    offset: Expression | None
    bits: int
    group_size: int
    input_order: Expression | None = None
    width: int | None = None
    table: str = ""
    activations: torch.dtype | None = None


for _dtype in LARGEST:
    weight_function(f"row_scales.{dtype_name(_dtype)}")(partial(row_scales, dtype=_dtype))
    weight_function(f"block_scales.{dtype_name(_dtype)}")(partial(block_scales, dtype=_dtype))
    weight_function(f"quantize.{dtype_name(_dtype)}")(partial(quantize_weight, dtype=_dtype))
for _dtype in (torch.bfloat16, torch.float16, torch.float32):
    weight_function(f"dequantize.{dtype_name(_dtype)}")(partial(dequantize_weight, dtype=_dtype))
    weight_function(f"dequantize_experts.{dtype_name(_dtype)}")(partial(dequantize_experts, dtype=_dtype))
    weight_function(f"dequantize_mxfp4.{dtype_name(_dtype)}")(partial(dequantize_mxfp4, dtype=_dtype))
weight_function("pack_quantized_weight")(pack_quantized_weight)
weight_function("deinterleave_rows")(deinterleave_rows)
weight_function("swap_inputs_and_outputs")(swap_inputs_and_outputs)
weight_function("pack_group_codes")(pack_group_codes)
weight_function("pack_group_scales")(pack_group_scales)
for _table in TABLES:
    weight_function(f"pack_group_codes.{_table}")(partial(pack_group_codes, table=_table))
    weight_function(f"pack_group_scales.{_table}")(partial(pack_group_scales, table=_table))
for _function in (
    "awq_codes",
    "gptq_codes",
    "gptq_zeros",
    "packed_rows",
    "packed_columns",
    "transposed",
    "low_nibble_first",
    "high_nibble_first",
    "scaled_scales",
    "divided_scales",
    "powers_of_two",
    "block_maxima",
    "nested_maxima",
):
    weight_function(_function)(getattr(group_formats, _function))

for _kind, _form in GGUF_FORMATS.items():

    def _of_blocks(rows_OB: torch.Tensor, form: GgufFormat, decode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return decode(form.blocks(rows_OB)).contiguous()

    weight_function(f"gguf_codes.{_kind}")(partial(_of_blocks, form=_form, decode=_form.codes))
    weight_function(f"gguf_scale.{_kind}")(partial(_of_blocks, form=_form, decode=_form.scale))
    if _form.offset is not None:
        weight_function(f"gguf_offset.{_kind}")(partial(_of_blocks, form=_form, decode=_form.offset))


def _dequantize_groups(
    codes_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    bits: int,
    group_size: int,
    *others: torch.Tensor,
    dtype: torch.dtype,
    has_offset: bool,
    has_groups: bool,
) -> torch.Tensor:
    if scale_OG.dtype == torch.float64:  # the verification of passes
        dtype = torch.float64
    offset_OG = others[0] if has_offset else None
    input_groups_I = others[-1].long() if has_groups else None
    return dequantize_groups(codes_OI, scale_OG, offset_OG, bits, group_size, dtype, input_groups_I)


for _dtype in (torch.bfloat16, torch.float16, torch.float32):
    for _has_offset in (False, True):
        for _has_groups in (False, True):
            weight_function(f"dequantize_groups.{dtype_name(_dtype)}.{int(_has_offset)}{int(_has_groups)}")(
                partial(_dequantize_groups, dtype=_dtype, has_offset=_has_offset, has_groups=_has_groups)
            )


def _dequantize_table(
    codes_OI: torch.Tensor, scale_OG: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype, table: str
) -> torch.Tensor:
    if scale_OG.dtype == torch.float64:  # the verification of passes
        dtype = torch.float64
    return dequantize_groups(codes_OI, scale_OG, None, bits, group_size, dtype, table=table)


for _dtype in (torch.bfloat16, torch.float16, torch.float32):
    for _table in TABLES:
        weight_function(f"dequantize_table.{dtype_name(_dtype)}.{_table}")(partial(_dequantize_table, dtype=_dtype, table=_table))


@weight_function("input_order")
def _input_order(*input_groups: torch.Tensor) -> torch.Tensor:
    """The columns in the order of their groups. The parts of a merged weight must agree. int32 [I] each → int64 [I]"""
    first = input_groups[0]
    is_real = type(first) is torch.Tensor  # not a tensor without data, of which only the shape is asked
    if is_real and not all(torch.equal(first, other) for other in input_groups[1:]):
        raise ValueError("Merged linears have different orders of their inputs (g_idx): compile with --disable-pass merge_linears.")
    return torch.argsort(first.long(), stable=True)


@weight_function("take_columns")
def _take_columns(codes_OI: torch.Tensor, order_I: torch.Tensor) -> torch.Tensor:
    return codes_OI[:, order_I]


for _padding in (padded_order, padded_columns, padded_scales, real_columns, is_column):
    weight_function(_padding.__name__)(_padding)


@weight_function("divide_groups")
def _divide_groups(scale_OG: torch.Tensor, parts: int) -> torch.Tensor:
    """Each group as `parts` equal groups. [O, G] → [O, G · parts]"""
    return scale_OG.repeat_interleave(parts, 1)


@weight_function("scale_to_rows")
def _scale_to_rows(scale: torch.Tensor, quantized_OI: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scale of a tensor [1] or of its rows [O, 1], as one scale per row. → float32 [O]"""
    return scale.float().reshape(-1).expand(quantized_OI.shape[0]).contiguous()


@weight_function("scb_to_rows")
def _scb_to_rows(largest_O: torch.Tensor, quantized_OI: torch.Tensor) -> torch.Tensor:
    """bitsandbytes' SCB, the largest magnitude of each row, as the scale of int8 values up to 127. → float32 [O]"""
    return _scale_to_rows(largest_O, quantized_OI) / 127


@weight_function("largest_scale")
def _largest_scale(*scales: torch.Tensor) -> torch.Tensor:
    """The scale with which no part of a merged input saturates. → float32 [1]"""
    return torch.stack([scale.float().reshape(1) for scale in scales]).amax(0)


def checkpoint_specs(specs: Mapping[str, TensorSpec], quantized: Mapping[str, StoredWeight]) -> dict[str, TensorSpec]:
    """The tensors that a checkpoint must hold: the parameters, and for quantized ones their own dtype and their scales."""
    sources = dict(specs)
    for name, stored in quantized.items():
        if not isinstance(stored, QuantizedWeight):
            if all(name != tensor for tensor, _, _ in stored.tensors):
                del sources[name]
            sources |= {tensor: TensorSpec(shape=shape, dtype=dtype) for tensor, shape, dtype in stored.tensors}
            continue
        sources[name] = TensorSpec(shape=specs[name].shape, dtype=stored.dtype)
        sources[stored.scale] = TensorSpec(shape=stored.scale_shape, dtype=torch.float32)
        if stored.input_scale is not None:
            sources[stored.input_scale] = TensorSpec(shape=(1,), dtype=torch.float32)
    return sources


def plain_expressions(specs: Mapping[str, TensorSpec], quantized: Mapping[str, StoredWeight]) -> dict[str, Expression]:
    """The expression of each parameter of the plain model: its name, or the dequantized value of a quantized tensor."""
    expressions: dict[str, Expression] = {name: name for name in specs}
    for name, stored in quantized.items():
        if isinstance(stored, ArrangedWeight):
            expressions[name] = stored.value
            continue
        if isinstance(stored, Mxfp4Weight):
            expressions[name] = (f"dequantize_mxfp4.{dtype_name(specs[name].dtype)}", stored.codes, stored.scales)
            continue
        if isinstance(stored, GroupedWeight) and stored.table:
            function = f"dequantize_table.{dtype_name(specs[name].dtype)}.{stored.table}"
            expressions[name] = (function, stored.codes, stored.scale, stored.bits, stored.group_size)
            continue
        if isinstance(stored, GroupedWeight):
            others = [part for part in (stored.offset, stored.input_groups) if part is not None]
            kinds = f"{int(stored.offset is not None)}{int(stored.input_groups is not None)}"
            expressions[name] = (
                f"dequantize_groups.{dtype_name(specs[name].dtype)}.{kinds}",
                stored.codes,
                stored.scale,
                stored.bits,
                stored.group_size,
                *others,
            )
            continue
        if len(specs[name].shape) == 3:
            scales: Expression = stored.scale if stored.per_block else ("expert_scale_to_rows", stored.scale, name)
            expressions[name] = (f"dequantize_experts.{dtype_name(specs[name].dtype)}", name, scales)
            continue
        scale: Expression = stored.scale if stored.per_block else (stored.scale_function, stored.scale, name)
        expressions[name] = (f"dequantize.{dtype_name(specs[name].dtype)}", name, scale)
    return expressions


def leaves(expression: Expression) -> list[Expression]:
    """The parts of an expression that are one parameter each, in order: names, or the dequantized values of `plain_expressions`."""
    if isinstance(expression, str) or _is_dequantized(expression):
        return [expression]
    assert isinstance(expression, tuple)
    return [leaf for argument in expression[1:] if not isinstance(argument, int) for leaf in leaves(argument)]


def parameter_of(leaf: Expression, quantized: Mapping[str, StoredWeight]) -> str:
    """The parameter of one of `leaves`. quantized: the checkpoint's quantized parameters."""
    name = leaf[1] if isinstance(leaf, tuple) else leaf
    if isinstance(name, tuple):
        names = (n for n, stored in quantized.items() if isinstance(stored, GroupedWeight) and stored.codes == name)
        name = next(names)
    assert isinstance(name, str)
    return name


def quantized_expression(
    expression: Expression,
    sources: Mapping[str, TensorSpec],
    quantized: Mapping[str, StoredWeight],
    *,
    dtype: torch.dtype | None = None,
    scales: Scales = "row",
    activations: Activations = "none",
) -> QuantizedExpression:
    """The quantized form of an expression. Raises `CannotQuantizeError`.

    dtype, scales, activations: format to which the weights are quantized. With dtype None, the checkpoint's format (`quantized`).
    """
    names = [parameter_of(leaf, quantized) for leaf in leaves(expression)]
    stored = [one for one in map(quantized.get, names) if isinstance(one, QuantizedWeight)]
    if dtype is None:
        if len(stored) < len(names):
            raise CannotQuantizeError("only a part of the merged weight is quantized in the checkpoint")
        if len({(s.dtype, s.activations, s.per_block) for s in stored}) > 1:
            raise CannotQuantizeError("the parts of the merged weight are quantized to different formats in the checkpoint")
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


def grouped_expression(
    expression: Expression, sources: Mapping[str, TensorSpec], quantized: Mapping[str, StoredWeight]
) -> GroupedExpression:
    """The form of an expression over group-quantized weights. Raises `CannotQuantizeError`."""
    stored = [quantized.get(parameter_of(leaf, quantized)) for leaf in leaves(expression)]
    grouped = [one for one in stored if isinstance(one, GroupedWeight)]
    if len(grouped) < len(stored):
        raise CannotQuantizeError("only a part of the merged weight is quantized to groups in the checkpoint")
    if len({storage_of(one) for one in grouped}) > 1:
        raise CannotQuantizeError("the parts of the merged weight are quantized to different formats in the checkpoint")
    parts = _grouped(expression, sources, quantized)
    order: Expression | None = parts.order
    width = None if order is None else _spec(order, sources).shape[0]
    if parts.input_groups is not None and grouped[0].input_groups is not None:
        order = ("input_order", *dict.fromkeys(one.input_groups for one in grouped))
        parts.codes = ("take_columns", parts.codes, order)
    return GroupedExpression(
        codes=parts.codes,
        scale=parts.scale,
        offset=parts.offset,
        bits=grouped[0].container_bits,
        group_size=parts.group_size,
        input_order=order,
        width=width,
        table=grouped[0].table,
        activations=grouped[0].activations,
    )


def storage_of(stored: GroupedWeight) -> tuple[Any, ...]:
    """Equal for weights that can be merged into one."""
    offset = None if stored.offset is None else stored.offset[0]
    layout = (stored.container_bits, stored.group_size, stored.codes[0], stored.table)
    return *layout, offset, stored.input_groups is not None, stored.activations


@dataclass(slots=True)
class _Grouped:
    codes: Any
    scale: Any
    offset: Any
    group_size: int
    input_groups: Any = None
    order: Any = None  # of padded columns


def _grouped(expression: Expression, sources: Mapping[str, TensorSpec], quantized: Mapping[str, StoredWeight]) -> _Grouped:
    assert isinstance(expression, tuple), "not a group-quantized weight"
    if _is_dequantized(expression):
        stored = quantized[parameter_of(expression, quantized)]
        assert isinstance(stored, GroupedWeight)
        return _Grouped(stored.codes, stored.scale, stored.offset, stored.group_size, stored.input_groups)
    function, *arguments = expression
    dimension = selected_dimension(function)
    if dimension is None:
        raise CannotQuantizeError(f"the weight is computed by {function}, which cannot be applied to its scales")
    parts = [a if isinstance(a, int) else _grouped(a, sources, quantized) for a in arguments]
    first = parts[0]
    assert isinstance(first, _Grouped)

    def of_parts(field: str) -> Any:
        if getattr(first, field) is None:
            return None
        return (function, *(part if isinstance(part, int) else getattr(part, field) for part in parts))

    if dimension == 0:
        if first.order is not None and any(isinstance(part, _Grouped) and part.order != first.order for part in parts):
            raise CannotQuantizeError("merged linears have different orders of their inputs (act-order)")
        return _Grouped(of_parts("codes"), of_parts("scale"), of_parts("offset"), first.group_size, first.input_groups, first.order)
    if first.input_groups is not None:
        return _padded(first, function, arguments[1:], of_parts("codes"), sources)
    width = _spec((function, *(p if isinstance(p, int) else p.codes for p in parts)), sources).shape[1]
    if _spec(first.scale, sources).shape[1] == 1:
        return _Grouped(of_parts("codes"), first.scale, first.offset, first.group_size)
    size = gcd(width, first.group_size)
    if size < first.group_size:
        if size % 32:
            raise CannotQuantizeError(f"a rank has {width} inputs, which divide groups of {first.group_size} too finely")
        first.scale = ("divide_groups", first.scale, first.group_size // size)
        first.offset = None if first.offset is None else ("divide_groups", first.offset, first.group_size // size)
    return _Grouped(of_parts("codes"), of_parts("scale"), of_parts("offset"), size)


def _padded(whole: _Grouped, function: str, sizes: list[Any], codes: Expression, sources: Mapping[str, TensorSpec]) -> _Grouped:
    """A rank's inputs of a weight with act-order. It has some inputs of each group, so groups are filled up with columns of zeros."""
    if function != "shard_columns" or whole.order is not None:
        raise CannotQuantizeError(f"its inputs are selected by {function}, and their groups are not adjacent (act-order)")
    (size,) = sizes
    mine = ("shard_rows", whole.input_groups, size, size)
    groups = _spec(whole.scale, sources).shape[1]
    order = ("padded_order", mine, groups, padded_width(_spec(codes, sources).shape[1], groups))

    def scales(values: Expression) -> Expression:
        return ("padded_scales", values, mine, order)

    offset = None if whole.offset is None else scales(whole.offset)
    return _Grouped(("padded_columns", codes, order), scales(whole.scale), offset, PADDED_GROUP, order=order)


def _is_dequantized(expression: Expression) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(expression, tuple) and str(expression[0]).startswith(("dequantize.", "dequantize_groups.", "dequantize_table."))


def _selects_rows(expression: Expression) -> bool:
    """Whether the expression selects a rank's rows of a tensor. Their scales need no other rows, so only they are read."""
    return is_selection(expression) and selected_dimension(expression[0]) == 0


def _quantize(
    expression: Expression, sources: Mapping[str, TensorSpec], dtype: torch.dtype, scales: Scales
) -> tuple[Expression, Expression]:
    if isinstance(expression, str) or (scales == "row" and _selects_rows(expression)):
        scale = (f"{scales}_scales.{dtype_name(dtype)}", expression)
        return (f"quantize.{dtype_name(dtype)}", expression, scale), scale
    if _is_dequantized(expression):
        return expression[1], expression[2]
    assert isinstance(expression, tuple), "a constant has no quantized form"
    function, *arguments = expression
    dimension = selected_dimension(function)
    if dimension is None:
        raise CannotQuantizeError(f"the weight is computed by {function}, which cannot be applied to its scales")
    parts: list[Any] = [argument if isinstance(argument, int) else _quantize(argument, sources, dtype, scales) for argument in arguments]
    values = (function, *(part if isinstance(part, int) else part[0] for part in parts))
    part_scales: list[Any] = [part if isinstance(part, int) else part[1] for part in parts]
    per_block = len(_spec(part_scales[0], sources).shape) == 2
    if not per_block and dimension == 1:
        return values, part_scales[0]
    if per_block:
        _require_whole_blocks(expression, dimension, sources)
    return values, (function, *part_scales)


def _require_whole_blocks(expression: tuple[Any, ...], dimension: int, sources: Mapping[str, TensorSpec]) -> None:
    """Check that every slice, and every concatenated tensor but the last, ends at the end of a block."""
    tensors = [argument for argument in expression[1:] if not isinstance(argument, int)]
    for part in tensors[:-1] if len(tensors) > 1 else [expression]:
        size = _spec(part, sources).shape[dimension]
        if size % BLOCK:
            what = "rows" if dimension == 0 else "columns"
            raise CannotQuantizeError(f"scales are per block of {BLOCK}, and a part of the weight has {size} {what}")


def _spec(expression: Expression, sources: Mapping[str, TensorSpec]) -> TensorSpec:
    return expression_spec(expression, sources, torch.device("cpu"))

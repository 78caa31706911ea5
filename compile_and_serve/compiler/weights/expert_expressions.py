"""Quantizes stacked weights of experts [X, O, I] that are expressions: their values and their scales are expressions, too.

As in `quantized_expressions`, what an expression does with the weight, it does with the values and the scales. An expression of experts
is a parameter, or a rank's share of its rows or columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from compile_and_serve.compiler.weights.quantized_expressions import CannotQuantizeError, Scales
from compile_and_serve.compiler.weights.transforms import Expression, TensorSpec, expression_spec, weight_function
from compile_and_serve.custom_ops.moe.packed_experts import pack_8bit_experts, pack_mxfp4_codes_cpu, pack_mxfp4_scales_cpu
from compile_and_serve.custom_ops.quantization import LARGEST, dtype_name, expert_block_scales, expert_row_scales, quantize_experts
from compile_and_serve.custom_ops.quantized.group_formats import dequantize_packed_experts
from compile_and_serve.custom_ops.quantized.mxfp4 import pack_mxfp4_codes, pack_mxfp4_scales

MXFP4 = "mxfp4"
PACKED = "dequantize_packed_experts."  # of `compressed-tensors`: no kernel of experts takes them
ROWS, COLUMNS = "shard_expert_rows", "shard_expert_columns"


for _dtype in LARGEST:
    weight_function(f"expert_row_scales.{dtype_name(_dtype)}")(partial(expert_row_scales, dtype=_dtype))
    weight_function(f"expert_block_scales.{dtype_name(_dtype)}")(partial(expert_block_scales, dtype=_dtype))
    weight_function(f"quantize_experts.{dtype_name(_dtype)}")(partial(quantize_experts, dtype=_dtype))
for _dtype in (torch.bfloat16, torch.float16, torch.float32):
    weight_function(f"{PACKED}{dtype_name(_dtype)}")(partial(dequantize_packed_experts, dtype=_dtype))


@weight_function("expert_scale_to_rows")
def _expert_scale_to_rows(scale: torch.Tensor, weight_XOI: torch.Tensor) -> torch.Tensor:
    """Scales [X, P, 1] of P equal parts of the rows, or of each row. → [X, O]"""
    rows = weight_XOI.shape[1] // scale.shape[1]
    return scale.squeeze(2).repeat_interleave(rows, 1) if rows > 1 else scale.squeeze(2)


weight_function("pack_mxfp4_codes")(pack_mxfp4_codes)
weight_function("pack_mxfp4_scales")(pack_mxfp4_scales)
for _pack in (pack_8bit_experts, pack_mxfp4_codes_cpu, pack_mxfp4_scales_cpu):
    weight_function(_pack.__name__)(_pack)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsExpression:
    """values: `format` [X, O, I], or MXFP4 codes. scale: float32 [X, O] or [X, ceil(O / 128), ceil(I / 128)], or MXFP4 scales."""

    values: Expression
    scale: Expression
    format: str


def parameter_of_experts(expression: Expression) -> Expression:
    """The parameter of an expression of experts: its name, or the value of `plain_expressions`."""
    while isinstance(expression, tuple) and expression[0] in (ROWS, COLUMNS):
        expression = expression[1]
    return expression


def is_stored_quantized(parameter: Expression) -> bool:
    """Whether the checkpoint holds a parameter (`parameter_of_experts`) quantized."""
    return isinstance(parameter, tuple) and str(parameter[0]).startswith(("dequantize_mxfp4.", "dequantize_experts.", PACKED))


def experts_expression(
    expression: Expression, sources: Mapping[str, TensorSpec], dtype: torch.dtype | None = None, scales: Scales = "row"
) -> ExpertsExpression:
    """The quantized form of an expression. Raises `CannotQuantizeError`.

    dtype, scales: format to which the weights are quantized. With dtype None, the checkpoint's.
    """
    if not isinstance(expression, tuple) or expression[0] not in (ROWS, COLUMNS):
        return _of_parameter(expression, sources, dtype, scales)
    if dtype is not None and scales == "row" and expression[0] == ROWS:  # the scales of rows need no other rows
        return _of_parameter(expression, sources, dtype, scales)
    function, argument, size = expression
    whole = experts_expression(argument, sources, dtype, scales)
    return ExpertsExpression(
        values=(function, whole.values, size), scale=_scale_of_share(function, whole.scale, size, sources), format=whole.format
    )


def _of_parameter(
    expression: Expression, sources: Mapping[str, TensorSpec], dtype: torch.dtype | None, scales: Scales
) -> ExpertsExpression:
    if dtype is not None:
        scale = (f"expert_{scales}_scales.{dtype_name(dtype)}", expression)
        values = (f"quantize_experts.{dtype_name(dtype)}", expression, scale)
        return ExpertsExpression(values=values, scale=scale, format=dtype_name(dtype))
    if not is_stored_quantized(expression):
        raise CannotQuantizeError("the checkpoint does not hold it quantized")
    assert isinstance(expression, tuple)
    if str(expression[0]).startswith(PACKED):
        raise CannotQuantizeError("there is no kernel of experts with packed codes: they were dequantized")
    function, values, scale = expression
    is_mxfp4 = str(function).startswith("dequantize_mxfp4.")
    form = MXFP4 if is_mxfp4 else dtype_name(expression_spec(values, sources, torch.device("cpu")).dtype)
    return ExpertsExpression(values=values, scale=scale, format=form)


def _scale_of_share(function: str, scale: Expression, size: int, sources: Mapping[str, TensorSpec]) -> Expression:
    """The scales of a rank's rows or columns."""
    shape = expression_spec(scale, sources, torch.device("cpu")).shape
    if len(shape) == 2:  # per row
        return (function, scale, size) if function == ROWS else scale
    count = shape[1] // 2 if function == ROWS else shape[2]
    if count % size or (function == ROWS and shape[1] % 2):
        what = "rows" if function == ROWS else "columns"
        raise CannotQuantizeError(f"{size} ranks would divide a block of {what} that share a scale")
    return (function, scale, size)

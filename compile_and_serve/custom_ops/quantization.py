"""Symmetric quantization in plain torch: value ≈ quantized · scale, with a scale per row, per block or per tensor.

Shape legend: T tokens, X experts, I input features, O output features, G = ceil(I / 128) groups of inputs.

The quantized dtypes are float8_e4m3fn (±448, three bits of mantissa) and int8 (±127, so that the range is symmetric).
"""

from __future__ import annotations

from typing import Literal

import torch

from compile_and_serve.custom_ops.weight_functions import weight_function

Activations = Literal["none", "dynamic", "static"]
Quantized = tuple[torch.Tensor, torch.Tensor]  # 8-bit activations and their scales: the result of `quantize_activations`

BLOCK = 128  # inputs and outputs of a block of scales
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = 1e-12  # the scale of zeros


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


@weight_function("row_scales")
def row_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """max |w| of each output's row over the largest value of `dtype`. [O, I] → float32 [O], of experts [X, O, I] → [X, O]"""
    return _scale(weight.abs().amax(-1), dtype).to(torch.float32)


@weight_function("block_scales")
def block_scales(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """max |w| of each block of 128 × 128 over the largest value of `dtype`. → float32 [ceil(O / 128), ceil(I / 128)], of each expert"""
    if weight.dim() == 3:
        return torch.stack([block_scales(weight_OI, dtype) for weight_OI in weight])
    out_features, in_features = weight.shape
    rows, columns = -(-out_features // BLOCK), -(-in_features // BLOCK)
    padding = (0, columns * BLOCK - in_features, 0, rows * BLOCK - out_features)
    blocks = torch.nn.functional.pad(weight, padding).view(rows, BLOCK, columns, BLOCK)
    return _scale(blocks.abs().amax((1, 3)), dtype).to(torch.float32)


@weight_function("quantize")
def quantize_weight(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round(w / scale), to nearest, ties to even. scale: of `row_scales` or `block_scales`. → `dtype` [O, I] or [X, O, I]"""
    if weight.dim() == 3:  # one expert at a time, for less memory
        return torch.stack([quantize_weight(*one, dtype) for one in zip(weight, scale, strict=True)])
    math_dtype = torch.promote_types(weight.dtype, torch.float32)
    return _round(weight.to(math_dtype) / expand_scale(scale, weight.shape).to(math_dtype), dtype)


@weight_function("dequantize")
def dequantize_weight(quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """quantized · scale, with one rounding to `dtype`. scale: as in `quantize_weight`. → [O, I] or [X, O, I]"""
    if quantized.dim() == 3:
        return torch.stack([dequantize_weight(*one, dtype) for one in zip(quantized, scale, strict=True)])
    math_dtype = torch.promote_types(dtype, torch.float32)
    return (quantized.to(math_dtype) * expand_scale(scale, quantized.shape).to(math_dtype)).to(dtype)


def expand_scale(scale: torch.Tensor, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    """A weight's scale in a shape that broadcasts over the weight [O, I]: [O] → [O, 1], [ceil(O / 128), ceil(I / 128)] → [O, I]."""
    if scale.dim() == 1:
        return scale[:, None]
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantize_activations(
    x_TI: torch.Tensor, dtype: torch.dtype, *, per_group: bool = False, input_scale: torch.Tensor | None = None
) -> Quantized:
    """round(x · (1 / scale)), and the scale: max |x| of the token (or of its group of 128 inputs) over the largest value of `dtype`.

    x_TI: [T, I]. input_scale: one value that replaces the scale. → `dtype` [T, I], float32 [T, 1] or, per_group, [T, G]
    The scale and the product with 1 / scale are in float32 (float64 for float64 inputs). Ties are rounded to even.
    """
    math_dtype = torch.promote_types(x_TI.dtype, torch.float32)
    num_tokens, in_features = x_TI.shape
    x_TI = x_TI.to(math_dtype)
    if not per_group:
        if input_scale is None:
            scale_T1 = _scale(x_TI.abs().amax(1, keepdim=True), dtype)
        else:
            scale_T1 = input_scale.to(math_dtype).reshape(1, 1).expand(num_tokens, 1)
        return _round(x_TI * scale_T1.reciprocal(), dtype), scale_T1
    assert input_scale is None, "a static scale is per tensor"
    groups = -(-in_features // BLOCK)
    padded_TGB = torch.nn.functional.pad(x_TI, (0, groups * BLOCK - in_features)).view(num_tokens, groups, BLOCK)
    scale_TG = _scale(padded_TGB.abs().amax(2), dtype)
    quantized_TGB = _round(padded_TGB * scale_TG.reciprocal()[:, :, None], dtype)
    return quantized_TGB.view(num_tokens, groups * BLOCK)[:, :in_features], scale_TG


def group_major_scales(num_tokens: int, num_groups: int, device: torch.device) -> torch.Tensor:
    """Memory for scales in which those of a group are adjacent. Each group begins at a multiple of 16 bytes. → float32 [T, G]"""
    return torch.empty(num_groups, -(-num_tokens // 4) * 4, dtype=torch.float32, device=device).t()[:num_tokens]


def _scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """largest over the largest value of `dtype`, by an exact division: by a number, torch on CUDA multiplies by its reciprocal instead."""
    largest = largest.to(torch.promote_types(largest.dtype, torch.float32))
    return (largest / largest.new_full((), LARGEST[dtype])).clamp_min(_SMALLEST_SCALE)


def _round(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A cast of a larger value gives NaN in float8, and wraps in int8.
    values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.round().to(dtype) if dtype == torch.int8 else values.to(dtype)


def round_to_cache(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in the dtype of a cache: float8 saturates, and NaN stays NaN."""
    if dtype in LARGEST:  # in some versions of torch, a cast gives NaN beyond the largest value
        x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.to(dtype)

"""Symmetric quantization in plain torch: value ≈ quantized · scale, with a scale per row, per block or per tensor.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.

The quantized dtypes are float8_e4m3fn (±448, three bits of mantissa) and int8 (±127, so that the range is symmetric).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Activations = Literal["none", "dynamic", "static"]
Quantized = tuple[torch.Tensor, torch.Tensor]  # 8-bit activations and their scales: the result of `quantize_activations`

BLOCK = 128  # inputs and outputs of a block of scales
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = 1e-12  # the scale of zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A quantized weight of a checkpoint, of `dtype`, with a float scale.

    scale: name of the scale in the checkpoint. scale_shape: (1,) per tensor, (O, 1) per output, or with per_block
    (ceil(O / 128), ceil(I / 128)). activations: that the checkpoint was quantized for. input_scale: name of the scale of "static"
    activations, one value.
    """

    dtype: torch.dtype
    scale: str
    scale_shape: tuple[int, ...]
    per_block: bool = False
    activations: Activations
    input_scale: str | None = None
    scale_function: str = "scale_to_rows"
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedWeight:
    """A weight of a checkpoint as unsigned codes with a scale per output and group of inputs, stored packed under other names.

    weight = (code − zero point) · scale, or code · scale + minimum. codes, scale, offset, input_groups: expressions of weight functions
    (`compiler/weights/transforms.py`) over the checkpoint's tensors:
    - codes: uint8 [O, I], less than 2^bits. scale: [O, G].
    - offset: [O, G], zero points as uint8, or minima as floating-point numbers; None: the zero point is 2^(bits − 1).
    - input_groups: int64 [I], the group of each input ("act-order"); None: groups are `group_size` adjacent inputs.
    tensors: name → shape and dtype of the checkpoint's tensors that they use.
    table: a name of `custom_ops/quantized/group_layout.py`'s `TABLES`: weight = table[code] · scale, without offsets.
    activations: dtype to which the checkpoint wants activations rounded, one scale per token.
    unused: names of further tensors of the weight that may be in the checkpoint.
    """

    bits: int
    group_size: int
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    codes: Any
    scale: Any
    offset: Any = None
    input_groups: Any = None
    table: str = ""
    activations: torch.dtype | None = None
    unused: tuple[str, ...] = ()

    @property
    def container_bits(self) -> int:
        """Bits of a code as the kernels store it. They take integers in groups of 16 with 8 bits only."""
        return 4 if self.bits <= 4 and (self.table or self.group_size % 32 == 0) else 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Weight:
    """Experts' weight [X, O, I] of a checkpoint in MXFP4 (`custom_ops/quantized/mxfp4.py`).

    codes, scales: expressions of weight functions over the checkpoint's tensors: uint8 [X, O, I / 32, 16] and uint8 [X, O, I / 32].
    tensors: name → shape and dtype of the checkpoint's codes, then of its scales.
    """

    codes: Any
    scales: Any
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangedWeight:
    """A weight that the checkpoint holds unquantized in another order of its elements.

    value: an expression of weight functions over the checkpoint's tensor. tensors: its name, shape and dtype.
    """

    value: Any
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


StoredWeight = QuantizedWeight | GroupedWeight | Mxfp4Weight | ArrangedWeight


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_quantized(stored: StoredWeight) -> bool:
    return not isinstance(stored, ArrangedWeight)


def row_scales(weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """max |w| of each output's row over the largest value of `dtype`. → float32 [O]"""
    return _scale(weight_OI.abs().amax(1), dtype).to(torch.float32)


def block_scales(weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """max |w| of each block of 128 × 128 over the largest value of `dtype`. → float32 [ceil(O / 128), ceil(I / 128)]"""
    out_features, in_features = weight_OI.shape
    rows, columns = -(-out_features // BLOCK), -(-in_features // BLOCK)
    padding = (0, columns * BLOCK - in_features, 0, rows * BLOCK - out_features)
    blocks = torch.nn.functional.pad(weight_OI, padding).view(rows, BLOCK, columns, BLOCK)
    return _scale(blocks.abs().amax((1, 3)), dtype).to(torch.float32)


def quantize_weight(weight_OI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """round(w / scale), to nearest, ties to even. scale: float32 [O], or [ceil(O / 128), ceil(I / 128)]. → `dtype` [O, I]"""
    math_dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    return _round(weight_OI.to(math_dtype) / expand_scale(scale, weight_OI.shape).to(math_dtype), dtype)


def dequantize_weight(quantized_OI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """quantized · scale, with one rounding to `dtype`. scale: as in `quantize_weight`. → [O, I]"""
    math_dtype = torch.promote_types(dtype, torch.float32)
    return (quantized_OI.to(math_dtype) * expand_scale(scale, quantized_OI.shape).to(math_dtype)).to(dtype)


def expert_row_scales(weight_XOI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`row_scales` of each expert. → float32 [X, O]"""
    return _scale(weight_XOI.abs().amax(2), dtype).to(torch.float32)


def expert_block_scales(weight_XOI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`block_scales` of each expert. → float32 [X, ceil(O / 128), ceil(I / 128)]"""
    return torch.stack([block_scales(weight_OI, dtype) for weight_OI in weight_XOI])


def quantize_experts(weight_XOI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`quantize_weight` of each expert. → `dtype` [X, O, I]"""
    return torch.stack([quantize_weight(*one, dtype) for one in zip(weight_XOI, scale, strict=True)])


def dequantize_experts(quantized_XOI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_weight` of each expert. → [X, O, I]"""
    if scale.dtype == torch.float64:  # the verification of passes
        dtype = torch.float64
    return torch.stack([dequantize_weight(*one, dtype) for one in zip(quantized_XOI, scale, strict=True)])


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

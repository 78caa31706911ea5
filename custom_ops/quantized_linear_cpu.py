"""The packed layout of int8 weights that the C++ kernel of `cas::quantized_linear` streams through.

Shape legend: I input features, O output features, B = 16 outputs a block, G = ceil(I / 4) groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from custom_ops.cpu_kernels import cpu_kernels_status, load_cpu_kernels
from custom_ops.linear import BLOCK_OUTPUTS

_GROUP_INPUTS = 4  # inputs that lie side by side for one output: what one 32-bit lane of the byte product takes
_SIGN = -128  # flipping it adds 128: the byte product takes unsigned weights
_MAX_IN_FEATURES = 2**16  # the kernel's sums are int32


def cpu_unsupported_reason(*, weight_dtype: torch.dtype, per_block: bool, in_features: int = 0) -> str | None:
    """None when the kernel takes such a weight, else one sentence why not. Builds the kernels at the first call.

    per_block: whether the weight's scale is per block of 128 × 128, not per output.
    """
    if weight_dtype != torch.int8:
        return f"the CPU kernel takes int8 weights, not {weight_dtype}"
    if per_block:
        return "the CPU kernel takes a scale per output, not per block"
    if in_features > _MAX_IN_FEATURES:
        return f"the CPU kernel takes at most {_MAX_IN_FEATURES} inputs, not {in_features}"
    load_cpu_kernels()
    return cpu_kernels_status()


def pack_int8_weight(quantized_OI: torch.Tensor) -> torch.Tensor:
    """int8 [O, I] → int8 [ceil(O / 16), ceil(I / 4), 64]: 16 outputs × 4 inputs side by side, the bytes those of weight + 128."""
    out_features, in_features = quantized_OI.shape
    blocks, groups = -(-out_features // BLOCK_OUTPUTS), -(-in_features // _GROUP_INPUTS)
    padded_OI = F.pad(quantized_OI, (0, groups * _GROUP_INPUTS - in_features, 0, blocks * BLOCK_OUTPUTS - out_features))
    grouped = padded_OI.view(blocks, BLOCK_OUTPUTS, groups, _GROUP_INPUTS).transpose(1, 2)
    return (grouped ^ _SIGN).reshape(blocks, groups, BLOCK_OUTPUTS * _GROUP_INPUTS)


def unpack_int8_weight(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_int8_weight`. → int8 [out_features, in_features]"""
    blocks, groups, _ = packed.shape
    grouped = (packed ^ _SIGN).view(blocks, groups, BLOCK_OUTPUTS, _GROUP_INPUTS)
    return grouped.transpose(1, 2).reshape(blocks * BLOCK_OUTPUTS, -1)[:out_features, :in_features]

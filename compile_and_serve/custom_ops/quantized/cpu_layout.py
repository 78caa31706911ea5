"""The packed layout of 8-bit weights for the C++ kernels of `cas::quantized_linear`.

Shape legend: I input features, O output features, B = 16 outputs per block, G = ceil(I / 4) groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cpu_kernels import quantized_cpu_kernel_library, quantized_cpu_kernels_status
from compile_and_serve.custom_ops.linear.fused_linear import BLOCK_OUTPUTS

_GROUP_INPUTS = 4  # adjacent inputs of one output, which fill a 32-bit lane of the byte product
_SIGN = -128  # flipping this bit adds 128: the byte product takes unsigned weights
_DTYPES = (torch.int8, torch.float8_e4m3fn)
_MAX_INT8_IN_FEATURES = 2**16  # the sums are int32


def cpu_unsupported_reason(*, weight_dtype: torch.dtype, per_block: bool, in_features: int = 0) -> str | None:
    """None when a kernel takes such a weight, else the reason in one sentence. The first call builds the kernels.

    per_block: whether the weight's scale is per block of 128 × 128, not per output.
    """
    if weight_dtype not in _DTYPES:
        return f"the CPU kernels take int8 and float8_e4m3fn weights, not {weight_dtype}"
    if per_block:
        return "the CPU kernels take a scale per output, not per block"
    if weight_dtype == torch.int8 and in_features > _MAX_INT8_IN_FEATURES:
        return f"the CPU kernel of int8 weights takes at most {_MAX_INT8_IN_FEATURES} inputs, not {in_features}"
    quantized_cpu_kernel_library()
    return quantized_cpu_kernels_status()


def pack_weight_cpu(quantized_OI: torch.Tensor) -> torch.Tensor:
    """[O, I] → [ceil(O / 16), ceil(I / 4), 64]: 16 outputs × 4 adjacent inputs. int8: the bytes are weight + 128."""
    out_features, in_features = quantized_OI.shape
    blocks, groups = -(-out_features // BLOCK_OUTPUTS), -(-in_features // _GROUP_INPUTS)
    padding = (0, groups * _GROUP_INPUTS - in_features, 0, blocks * BLOCK_OUTPUTS - out_features)
    padded_OI = F.pad(quantized_OI.view(torch.int8), padding)
    grouped = padded_OI.view(blocks, BLOCK_OUTPUTS, groups, _GROUP_INPUTS).transpose(1, 2)
    if quantized_OI.dtype == torch.int8:
        grouped = grouped ^ _SIGN
    return grouped.reshape(blocks, groups, BLOCK_OUTPUTS * _GROUP_INPUTS).view(quantized_OI.dtype)


def unpack_weight_cpu(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_weight_cpu`. → [out_features, in_features]"""
    blocks, groups, _ = packed.shape
    grouped = packed.view(torch.int8).view(blocks, groups, BLOCK_OUTPUTS, _GROUP_INPUTS)
    if packed.dtype == torch.int8:
        grouped = grouped ^ _SIGN
    padded_OI = grouped.transpose(1, 2).reshape(blocks * BLOCK_OUTPUTS, -1)
    return padded_OI[:out_features, :in_features].contiguous().view(packed.dtype)

"""What the attention kernels do with an int8 cache: `int8_cache.py` says where its values and scales lie.

Shape legend: N heads or tokens, R half a head's values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_and_serve.custom_ops.triton_quantize import round_to

UNIT = tl.constexpr(128.0)


@triton.jit
def scales_of(pages, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The first scale of each head's keys (or values) in a block. pages: pointers to the first value."""
    return (pages + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32))


@triton.jit
def int8_scale(low_NR, high_NR):
    """Largest |x| of both halves over 127. NaN if one of them is NaN. → float32 [N]"""
    low_NR, high_NR = low_NR.to(tl.float32), high_NR.to(tl.float32)
    largest_N = tl.maximum(tl.max(tl.abs(low_NR), 1), tl.max(tl.abs(high_NR), 1))
    num_nan_N = tl.sum((low_NR != low_NR).to(tl.int32), 1) + tl.sum((high_NR != high_NR).to(tl.int32), 1)
    return tl.where(num_nan_N > 0, float("nan"), tl.maximum(tl.div_rn(largest_N, 127.0), 1e-12))


@triton.jit
def to_int8(x_NR, scale_N):
    """round(x · (1 / scale)), ties to even, as `quantize_activations`."""
    values_NR = x_NR.to(tl.float32) * tl.div_rn(1.0, scale_N)[:, None]
    return round_to(tl.minimum(tl.maximum(values_NR, -127.0), 127.0), tl.int8)


@triton.jit
def from_cache(values, dtype: tl.constexpr):
    """Cached values in the dtype of the products. int8 in float16: 1152 + x is exact, and the bits of 1152 plus x.

    That takes fewer and faster instructions than a conversion.
    """
    if values.dtype == tl.int8 and dtype == tl.float16:
        return (values.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    return values.to(dtype)


@triton.jit
def load_scales(pages_C, offset_C, ok_C, TO_VALUES: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The scales of the keys, and of the values times UNIT, by which the caller divides the weighted sums.

    The factor keeps products of small probabilities and scales in float16's range. pages_C: the head's keys in each token's block.
    offset_C: of the token in the block. Elsewhere than at ok_C, both are 0.
    """
    scale_C = scales_of(pages_C, BLOCK_SIZE, HEAD_DIM) + offset_C
    return tl.load(scale_C, mask=ok_C, other=0.0), tl.load(scale_C + TO_VALUES // 4, mask=ok_C, other=0.0) * UNIT

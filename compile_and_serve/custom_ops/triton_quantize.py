"""Row-wise kernels around a scaled GEMM: RMSNorm and quantization to 8 bits before it, scaling of its sums after it.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.quantization import BLOCK, LARGEST, Quantized, group_major_scales
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    supports_pdl,
    wait_for_previous,
)

_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to a float32 below 2^22, it rounds to an integer, ties to even


@triton.jit
def round_to(values, DTYPE: tl.constexpr):
    """Values of DTYPE's range rounded to it, to nearest, ties to even."""
    if tl.int8 == DTYPE:
        values = (values + _HALF_EVEN) - _HALF_EVEN
    return values.to(DTYPE)


@triton.jit
def store_quantized(
    x_I,
    row,
    cols_I,
    ok_I,
    out_ptr,
    scale_ptr,
    input_scale_ptr,
    num_features,
    IS_STATIC: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    scale_row_stride=1,
    scale_group_stride=1,
):
    """Quantize a whole row to 8 bits and store it with its scales.

    x_I: the row in float32, with zeros after its end. GROUP: values per scale; BLOCK: one scale for the row.
    scale_row_stride, scale_group_stride: where the scales of a row and of a group begin; one scale per row needs neither.
    """
    x_GB = tl.reshape(x_I, (BLOCK // GROUP, GROUP))
    largest_G = tl.max(tl.abs(x_GB), 1)
    if IS_STATIC:
        scale_G = tl.zeros_like(largest_G) + tl.load(input_scale_ptr).to(tl.float32)
    else:
        scale_G = tl.maximum(tl.div_rn(largest_G, LARGEST_VALUE), 1e-12)
    # A maximum drops NaN; NaN must stay NaN.
    scale_G = tl.where(tl.sum((x_GB != x_GB).to(tl.int32), 1) > 0, float("nan"), scale_G)
    # Exact divisions, as in the reference: with a constant scale many values lie halfway between two float8 values.
    values_GB = x_GB * tl.div_rn(1.0, scale_G)[:, None]
    values_GB = round_to(tl.minimum(tl.maximum(values_GB, -LARGEST_VALUE), LARGEST_VALUE), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_features + cols_I, tl.reshape(values_GB, (BLOCK,)), mask=ok_I)
    groups = tl.arange(0, BLOCK // GROUP)
    at_G = row * scale_row_stride + groups * scale_group_stride
    tl.store(scale_ptr + at_G, scale_G, mask=groups < tl.cdiv(num_features, GROUP))


def quantize_constants(quantized: Quantized | None) -> dict[str, Any]:
    """Constants of a kernel that can also `store_quantized` its rows. quantized: tensors for the values and scales, if it does."""
    return {"QUANTIZE": quantized is not None, "LARGEST_VALUE": LARGEST[quantized[0].dtype] if quantized else None}


@triton.jit
def _quantize_kernel(
    x_ptr,
    norm_ptr,
    input_scale_ptr,
    out_ptr,
    scale_ptr,
    num_features,
    x_stride,
    eps,
    HAS_NORM: tl.constexpr,
    IS_STATIC: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_MAJOR: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols_I = tl.arange(0, BLOCK)
    ok_I = cols_I < num_features
    if HAS_NORM:
        norm_I = tl.load(norm_ptr + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    x_I = tl.load(x_ptr + row * x_stride + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x_I * x_I) / num_features + eps)
        x_I = (x_I * inverse_rms * norm_I).to(x_ptr.dtype.element_ty).to(tl.float32)
    row_stride = 1 if GROUP_MAJOR else tl.cdiv(num_features, GROUP)
    group_stride = tl.cdiv(tl.num_programs(0), 4) * 4 if GROUP_MAJOR else 1
    store_quantized(
        x_I,
        row,
        cols_I,
        ok_I,
        out_ptr,
        scale_ptr,
        input_scale_ptr,
        num_features,
        IS_STATIC,
        LARGEST_VALUE,
        GROUP,
        BLOCK,
        row_stride,
        group_stride,
    )


def quantize_rows(
    x_TI: torch.Tensor,
    dtype: torch.dtype,
    *,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    per_group: bool = False,
    input_scale: torch.Tensor | None = None,
    group_major: bool = False,
) -> Quantized:
    """`quantize_activations` of rms_norm(x), or of x, on the device.

    x_TI: [T, I], rows may be strided. The norm is rounded to x's dtype before it is quantized. group_major: the scales are laid out as by
    `group_major_scales`. → `dtype` [T, I], float32 [T, 1] or, per_group, [T, G]
    """
    assert input_scale is None or not per_group, "a static scale is per tensor"
    num_tokens, num_features = x_TI.shape
    width = max(BLOCK, next_power_of_2(num_features))
    num_groups = cdiv(num_features, BLOCK) if per_group else 1
    out_TI = torch.empty(num_tokens, num_features, dtype=dtype, device=x_TI.device)
    if group_major:
        scale = group_major_scales(num_tokens, num_groups, x_TI.device)
    else:
        scale = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x_TI.device)
    if num_tokens:
        pdl = supports_pdl(x_TI.device)
        warps = max(1, min(16 if width <= 16384 else 32, width // 512))
        launch(
            _quantize_kernel,
            (num_tokens,),
            x_TI,
            norm_weight_I,
            input_scale,
            out_TI,
            scale,
            num_features,
            x_TI.stride(0),
            eps,
            HAS_NORM=norm_weight_I is not None,
            IS_STATIC=input_scale is not None,
            LARGEST_VALUE=LARGEST[dtype],
            GROUP=BLOCK if per_group else width,
            BLOCK=width,
            GROUP_MAJOR=group_major,
            PDL=pdl,
            num_warps=warps,
            **launch_options(pdl),
        )
    return out_TI, scale


@triton.jit
def _scale_kernel(sums_ptr, x_scale_ptr, scale_ptr, out_ptr, num_features, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols_O = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_O = cols_O < num_features
    scale_O = tl.load(scale_ptr + cols_O, mask=ok_O, other=0.0)
    let_next_start(PDL)
    wait_for_previous(PDL)
    sums_O = tl.load(sums_ptr + row * num_features + cols_O, mask=ok_O, other=0.0).to(tl.float32)
    y_O = sums_O * (scale_O * tl.load(x_scale_ptr + row))
    tl.store(out_ptr + row * num_features + cols_O, y_O.to(out_ptr.dtype.element_ty), mask=ok_O)


def scale_sums(sums_TO: torch.Tensor, x_scale_T1: torch.Tensor, scale_O: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y = sums · x_scale · scale in float32, with one rounding. sums_TO: int32 or float32, contiguous. → `dtype` [T, O]"""
    num_tokens, num_features = sums_TO.shape
    out_TO = torch.empty(num_tokens, num_features, dtype=dtype, device=sums_TO.device)
    if num_tokens:
        block = min(1024, next_power_of_2(num_features))
        pdl = supports_pdl(sums_TO.device)
        launch(
            _scale_kernel,
            (num_tokens, cdiv(num_features, block)),
            sums_TO,
            x_scale_T1,
            scale_O,
            out_TO,
            num_features,
            BLOCK=block,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out_TO

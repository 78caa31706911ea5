"""Row-wise kernels around a library GEMM: RMSNorm and SiLU-mul.

Shape legend: T tokens, I features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.quantization import Quantized
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    gate,
    launch_options,
    let_next_start,
    next_power_of_2,
    supports_pdl,
    wait_for_previous,
)
from compile_and_serve.custom_ops.triton_quantize import quantize_constants, store_quantized


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    num_features,
    x_stride,
    residual_stride,
    eps,
    quantized_ptr,
    scale_ptr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols_I = tl.arange(0, BLOCK)
    ok_I = cols_I < num_features
    weight_I = tl.load(weight_ptr + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    x_I = tl.load(x_ptr + row * x_stride + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x_I += tl.load(residual_ptr + row * residual_stride + cols_I, mask=ok_I, other=0.0).to(tl.float32)
        rounded_I = x_I.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * num_features + cols_I, rounded_I, mask=ok_I)
        x_I = rounded_I.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x_I * x_I) / num_features + eps)
    y_I = (x_I * inverse_rms * weight_I).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_features + cols_I, y_I, mask=ok_I)
    if QUANTIZE:
        store_quantized(
            y_I.to(tl.float32), row, cols_I, ok_I, quantized_ptr, scale_ptr, None, num_features, False, LARGEST_VALUE, BLOCK, BLOCK
        )


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, half, x_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_I = cols_I < half
    let_next_start(PDL)
    wait_for_previous(PDL)
    gate_I = tl.load(x_ptr + row * x_stride + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    up_I = tl.load(x_ptr + row * x_stride + half + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    y_I = gate(gate_I, GELU) * up_I
    tl.store(out_ptr + row * half + cols_I, y_I.to(out_ptr.dtype.element_ty), mask=ok_I)


def rms_norm(x_TI: torch.Tensor, weight_I: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight, in float32 with one rounding. x_TI: [T, I], rows may be strided. → [T, I], x's dtype."""
    return _rms_norm(x_TI, None, weight_I, eps)[0]


def add_rms_norm(
    x_TI: torch.Tensor, residual_TI: torch.Tensor, weight_I: torch.Tensor, eps: float, quantized: Quantized | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual, in x's dtype; y = rms_norm(s) · weight. Both [T, I], rows may be strided. → y, s, each [T, I] in x's dtype.

    quantized: receives `quantize_rows` of y: 8 bits [T, I], float32 [T, 1].
    """
    return _rms_norm(x_TI, residual_TI, weight_I, eps, quantized)


def _rms_norm(
    x_TI: torch.Tensor, residual_TI: torch.Tensor | None, weight_I: torch.Tensor, eps: float, quantized: Quantized | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_features = x_TI.shape
    out_TI = x_TI.new_empty(num_tokens, num_features)
    sum_TI = x_TI if residual_TI is None else torch.empty_like(out_TI)
    if num_tokens:
        block = next_power_of_2(num_features)
        pdl = supports_pdl(x_TI.device)
        launch(
            _rms_norm_kernel,
            (num_tokens,),
            x_TI,
            residual_TI,
            weight_I,
            sum_TI,
            out_TI,
            num_features,
            x_TI.stride(0),
            residual_TI.stride(0) if residual_TI is not None else 0,
            eps,
            *(quantized or (None, None)),
            HAS_RESIDUAL=residual_TI is not None,
            BLOCK=block,
            PDL=pdl,
            **quantize_constants(quantized),
            num_warps=max(1, min(16, block // 512)),
            **launch_options(pdl),
        )
    return out_TI, sum_TI


def silu_mul_rows(x_TI: torch.Tensor, out_TI: torch.Tensor | None = None, gelu: bool = False) -> torch.Tensor:
    """y = silu(first half) · second half, in float32 with one rounding. x_TI: [T, 2 * I], rows may be strided. → [T, I], x's dtype.

    out_TI: contiguous, receives the result. gelu: GELU's tanh form in place of SiLU.
    """
    num_tokens, half = x_TI.shape[0], x_TI.shape[1] // 2
    if out_TI is None:
        out_TI = x_TI.new_empty(num_tokens, half)
    if num_tokens:
        block = min(1024, next_power_of_2(half))
        pdl = supports_pdl(x_TI.device)
        launch(
            _silu_mul_kernel,
            (num_tokens, cdiv(half, block)),
            x_TI,
            out_TI,
            half,
            x_TI.stride(0),
            GELU=gelu,
            BLOCK=block,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out_TI

"""`cas::add_rms_norm` and `cas::silu_mul`: row-wise ops that are not fused into a linear.

Shape legend: T tokens, I features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cpu_kernels import cpu_kernels_status, load_cpu_kernels
from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.platform import platform_of

DTYPES = (torch.bfloat16, torch.float32)


def elementwise_unsupported_reason(*, device: torch.device, dtype: torch.dtype) -> str | None:
    """None when both ops have a CPU kernel, else the reason in one sentence. (The ops themselves run anywhere.)"""
    if not platform_of(device).runs_cpp_kernels:
        return f"these kernels run on the CPU only, not on {device.type}"
    if dtype not in DTYPES:
        return f"the row-wise CPU kernels take bfloat16 and float32, not {dtype}"
    load_cpu_kernels()
    return cpu_kernels_status()


def _add_rms_norm(x_TI: torch.Tensor, residual_TI: torch.Tensor, weight_I: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    sum_TI = (x_TI + residual_TI).contiguous()
    return sum_TI, F.rms_norm(sum_TI, (sum_TI.shape[1],), weight_I, eps)


def _add_rms_norm_cuda(
    x_TI: torch.Tensor, residual_TI: torch.Tensor, weight_I: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from compile_and_serve.custom_ops.linear.triton_elementwise import (
        add_rms_norm as triton_add_rms_norm,  # imported here, because Triton may be missing
    )

    out_TI, sum_TI = triton_add_rms_norm(_rows(x_TI), _rows(residual_TI), weight_I, eps)
    return sum_TI, out_TI


def _silu_mul(x_TI: torch.Tensor) -> torch.Tensor:
    gate, up = x_TI.to(torch.promote_types(x_TI.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x_TI.dtype)


def _silu_mul_cuda(x_TI: torch.Tensor) -> torch.Tensor:
    from compile_and_serve.custom_ops.linear.triton_elementwise import silu_mul_rows

    return silu_mul_rows(_rows(x_TI))


def _rows(x_TI: torch.Tensor) -> torch.Tensor:
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    version=1,
    fake=lambda x_TI, *_: (x_TI.new_empty(x_TI.shape), x_TI.new_empty(x_TI.shape)),
    reference=_add_rms_norm,
    CUDA=_add_rms_norm_cuda,
)
SILU_MUL = define(
    "silu_mul(Tensor x) -> Tensor",
    version=1,
    fake=lambda x_TI: x_TI.new_empty(x_TI.shape[0], x_TI.shape[1] // 2),
    reference=_silu_mul,
    CUDA=_silu_mul_cuda,
)


def add_rms_norm(x_TI: torch.Tensor, residual_TI: torch.Tensor, weight_I: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual, in x's dtype; y = s / sqrt(mean(s²) + eps) · weight, in float32 with one rounding.

    x_TI, residual_TI: [T, I], rows may be strided; weight_I: [I]; all of one dtype. → s, y, each [T, I], contiguous.
    """
    return ADD_RMS_NORM(x_TI, residual_TI, weight_I, eps)


def silu_mul(x_TI: torch.Tensor) -> torch.Tensor:
    """y = silu(first half) · second half, in float32 with one rounding. x_TI: [T, 2 * I], rows may be strided. → [T, I], contiguous."""
    return SILU_MUL(x_TI)

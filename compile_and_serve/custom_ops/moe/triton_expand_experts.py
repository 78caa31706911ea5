"""Dequantizes 8-bit weights of experts to scratch memory, for `triton_experts`' kernels over many pairs.

Shape legend: X experts, O output features, I input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.moe.triton_experts import BLOCK_SCALES, block_scale_at
from compile_and_serve.custom_ops.quantization import BLOCK
from compile_and_serve.custom_ops.triton_common import cdiv, launch_options, let_next_start, supports_pdl, wait_for_previous


@triton.jit
def _dequantize_experts_kernel(
    w_ptr, scale_ptr, out_ptr, outputs, inputs, SCALES: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr
):
    """One tile of one expert: value · scale in float32, rounded once. A tile's columns are in one block of scales."""
    expert = tl.program_id(2).to(tl.int64)
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    cols_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    ok_O = rows_O < outputs
    ok_OI = ok_O[:, None] & (cols_I < inputs)[None, :]
    at_OI = (expert * outputs + rows_O)[:, None] * inputs + cols_I[None, :]
    let_next_start(PDL)
    w_OI = tl.load(w_ptr + at_OI, mask=ok_OI, other=0.0).to(tl.float32)
    if SCALES == BLOCK_SCALES:
        at_O = block_scale_at(scale_ptr, expert, rows_O, outputs, inputs) + tl.program_id(1)
    else:
        at_O = scale_ptr + expert * outputs + rows_O
    values_OI = w_OI * tl.load(at_O, mask=ok_O, other=0.0)[:, None]
    wait_for_previous(PDL)
    tl.store(out_ptr + at_OI, values_OI.to(out_ptr.dtype.element_ty), mask=ok_OI)


def dequantize(quantized: torch.Tensor, scale: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights in `dtype`. quantized: [X, O, inputs]"""
    num_experts, outputs, _ = quantized.shape
    out = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    pdl, block_o = supports_pdl(out.device), 32
    launch(
        _dequantize_experts_kernel,
        (cdiv(outputs, block_o), cdiv(inputs, BLOCK), num_experts),
        quantized,
        scale,
        out,
        outputs,
        inputs,
        SCALES=scale.dim() - 1,
        BLOCK_O=block_o,
        BLOCK_I=BLOCK,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out

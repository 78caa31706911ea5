"""`cas::experts` on CUDA by the "gemv" method, for few pairs: each program multiplies a few rows of one expert by one token, in float32,
without tensor cores. A kernel computes gate and up products with the activation, which writes h [P, F], and one the weighted sums of down
products. Activations that are rounded to float8 are multiplied by the scales of their blocks as they are read; the scale of a row
multiplies the sums.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), X experts, D hidden size, F intermediate size
of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.moe.triton_experts import BLOCK, BLOCK_SCALES, ROW_SCALES, Operands, activated, block_scale_at
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    supports_pdl,
    wait_for_previous,
)

GEMV_ROWS = 4  # of a program


@triton.jit
def _gemv_gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    ids_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    norm_ptr,
    h_ptr,
    x_stride,
    features,
    inputs,
    top_k,
    limit,
    eps,
    num_slots,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LANES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(1)
    rows_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    ok_F = rows_F < features
    safe_rows_F = tl.where(ok_F, rows_F, 0).to(tl.int64)
    cols_1D = tl.arange(0, BLOCK_D)[None, :]
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if expert >= num_slots:  # another rank's
        return
    gate_FD = w_ptr + expert * (2 * features.to(tl.int64) * inputs) + safe_rows_F[:, None] * inputs + cols_1D
    up_FD = gate_FD + features.to(tl.int64) * inputs
    x_1D = x_ptr + (pair // top_k).to(tl.int64) * x_stride + cols_1D
    acc = tl.zeros((BLOCK_F, BLOCK_D // LANES), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_F, BLOCK_D // LANES), dtype=tl.float32)
    square_1D = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_D):
        ok_1D = start + cols_1D < inputs
        gate = tl.load(gate_FD + start, mask=ok_1D, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(up_FD + start, mask=ok_1D, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_1D + start, mask=ok_1D, other=0.0).to(tl.float32)
        if HAS_X_SCALE and SCALES == BLOCK_SCALES:
            x_scale_1D = x_scale_ptr + (pair // top_k) * tl.cdiv(inputs, BLOCK) + (start + cols_1D) // BLOCK
            x *= tl.load(x_scale_1D, mask=ok_1D, other=0.0)
        if HAS_NORM:
            square_1D += x * x
            x *= tl.load(norm_ptr + start + cols_1D, mask=ok_1D, other=0.0).to(tl.float32)
        x_up = x
        if SCALES == BLOCK_SCALES:  # the program's rows are in one block
            first_row = tl.program_id(0) * BLOCK_F
            at_1D = block_scale_at(scale_ptr, expert, first_row, 2 * features, inputs) + (start + cols_1D) // BLOCK
            up_at_1D = block_scale_at(scale_ptr, expert, features + first_row, 2 * features, inputs) + (start + cols_1D) // BLOCK
            x_up = x * tl.load(up_at_1D, mask=ok_1D, other=0.0)
            x *= tl.load(at_1D, mask=ok_1D, other=0.0)
        acc += tl.sum(tl.reshape(gate * x, (BLOCK_F, BLOCK_D // LANES, LANES)), 2)
        acc_up += tl.sum(tl.reshape(up * x_up, (BLOCK_F, BLOCK_D // LANES, LANES)), 2)
    gate_F, up_F = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if SCALES == ROW_SCALES:
        x_scale = tl.load(x_scale_ptr + pair // top_k) if HAS_X_SCALE else 1.0
        gate_F *= x_scale * tl.load(scale_ptr + expert * 2 * features + safe_rows_F)
        up_F *= x_scale * tl.load(scale_ptr + expert * 2 * features + features + safe_rows_F)
    if HAS_NORM:
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(square_1D) / inputs + eps)
        gate_F *= inverse_rms
        up_F *= inverse_rms
    if HAS_BIAS:
        bias_F = bias_ptr + expert * 2 * features + rows_F
        gate_F += tl.load(bias_F, mask=ok_F, other=0.0).to(tl.float32)
        up_F += tl.load(bias_F + features, mask=ok_F, other=0.0).to(tl.float32)
    out_F = activated(gate_F, up_F, limit, CLAMPED)
    tl.store(h_ptr + pair * features + rows_F, out_F.to(h_ptr.dtype.element_ty), mask=ok_F)


@triton.jit
def _gemv_down_kernel(
    h_ptr,
    h_scale_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    features,
    top_k,
    residual_stride,
    num_slots,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < outputs
    safe_rows_O = tl.where(ok_O, rows_O, 0).to(tl.int64)
    slots_K = tl.arange(0, BLOCK_K)
    ok_K = slots_K < top_k
    pairs_K = token * top_k + tl.where(ok_K, slots_K, 0)
    cols_F = tl.arange(0, BLOCK_F)
    let_next_start(PDL)
    wait_for_previous(PDL)
    experts_K = tl.load(ids_ptr + pairs_K).to(tl.int64)
    ok_K = ok_K & (experts_K < num_slots)  # the others are another rank's
    experts_K = tl.where(ok_K, experts_K, 0)
    weights_K = tl.load(weights_ptr + pairs_K, mask=ok_K, other=0.0).to(tl.float32)
    w_KO = experts_K[:, None] * (outputs.to(tl.int64) * features) + safe_rows_O[None, :] * features
    w_KOF = w_ptr + w_KO[:, :, None] + cols_F[None, None, :]
    h_KF = h_ptr + pairs_K[:, None] * features + cols_F[None, :]
    acc_KOF = tl.zeros((BLOCK_K, BLOCK_O, BLOCK_F), dtype=tl.float32)
    for start in range(0, features, BLOCK_F):
        ok_F = start + cols_F < features
        ok_KF = ok_K[:, None] & ok_F[None, :]
        w = tl.load(w_KOF + start, mask=ok_KF[:, None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        h = tl.load(h_KF + start, mask=ok_KF, other=0.0).to(tl.float32)
        if HAS_X_SCALE and SCALES == BLOCK_SCALES:
            h_scale_KF = h_scale_ptr + pairs_K[:, None] * tl.cdiv(features, BLOCK) + ((start + cols_F) // BLOCK)[None, :]
            h *= tl.load(h_scale_KF, mask=ok_KF, other=0.0)
        if SCALES == BLOCK_SCALES:
            at_K = block_scale_at(scale_ptr, experts_K, tl.program_id(0) * BLOCK_O, outputs, features)
            h *= tl.load(at_K[:, None] + ((start + cols_F) // BLOCK)[None, :], mask=ok_KF, other=0.0)
        acc_KOF += w * h[:, None, :]
    y_KO = tl.sum(acc_KOF, 2)
    if SCALES == ROW_SCALES:
        y_KO *= tl.load(scale_ptr + experts_K[:, None] * outputs + safe_rows_O[None, :])
        if HAS_X_SCALE:
            y_KO *= tl.load(h_scale_ptr + pairs_K, mask=ok_K, other=0.0)[:, None]
    if HAS_BIAS:
        bias_KO = bias_ptr + experts_K[:, None] * outputs + rows_O[None, :]
        y_KO += tl.load(bias_KO, mask=ok_K[:, None] & ok_O[None, :], other=0.0).to(tl.float32)
    y_KO = y_KO.to(out_ptr.dtype.element_ty).to(tl.float32)
    out_O = tl.sum(y_KO * weights_K[:, None], 0)
    if HAS_RESIDUAL:
        out_O += tl.load(residual_ptr + token.to(tl.int64) * residual_stride + rows_O, mask=ok_O, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * outputs + rows_O, out_O.to(out_ptr.dtype.element_ty), mask=ok_O)


def run_gemv(operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """The "gemv" method. gate_up: replaces the operands' weight, for the tuner."""
    top_k = operands.top_k
    (num_tokens, hidden), features = operands.x_TD.shape, operands.down.shape[2]
    h_PF = operands.x_TD.new_empty(operands.num_pairs, features)
    out_TD = operands.x_TD.new_empty(num_tokens, hidden)
    x_TD, x_scale = operands.rounded(operands.x_TD, is_input=True)
    norm_weight = operands.norm_weight_D if x_scale is None else None
    pdl = supports_pdl(x_TD.device)
    lanes = 16 // gate_up.element_size()
    warps, block_f, block_o, block_k = 4, GEMV_ROWS, GEMV_ROWS, next_power_of_2(top_k)
    launch(
        _gemv_gate_up_kernel, (cdiv(features, block_f), operands.num_pairs),
        x_TD, x_scale, operands.ids_TK, gate_up, operands.gate_up_scale, operands.gate_up_bias, norm_weight,
        h_PF, x_TD.stride(0), features, hidden, top_k,
        operands.limit, operands.eps, gate_up.shape[0],
        HAS_BIAS=operands.gate_up_bias is not None, HAS_NORM=norm_weight is not None, CLAMPED=operands.clamped,
        BLOCK_F=block_f, BLOCK_D=32 * warps * lanes, LANES=lanes, SCALES=operands.scales,
        HAS_X_SCALE=x_scale is not None, PDL=pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    h_PF, h_scale = operands.rounded(h_PF)
    launch(
        _gemv_down_kernel,
        (cdiv(hidden, block_o), num_tokens),
        h_PF,
        h_scale,
        operands.ids_TK,
        operands.weights_TK,
        operands.down,
        operands.down_scale,
        operands.down_bias,
        operands.residual_TD,
        out_TD,
        hidden,
        features,
        top_k,
        operands.residual_stride,
        gate_up.shape[0],
        HAS_BIAS=operands.down_bias is not None,
        HAS_RESIDUAL=operands.residual_TD is not None,
        BLOCK_K=block_k,
        BLOCK_O=block_o,
        BLOCK_F=256,
        SCALES=operands.scales,
        HAS_X_SCALE=h_scale is not None,
        PDL=pdl,
        num_warps=warps,
        **launch_options(pdl),
    )
    return out_TD

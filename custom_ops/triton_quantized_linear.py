"""The Triton kernels that stream 8-bit weights [O, I] for few tokens: bias, SiLU-mul and residual in the same kernel.

Shape legend: T tokens, I input features, O output features (R: rows that are stored, O or O / 2 with silu_mul), G groups of 128
inputs.

- `gemv`, 1 token: each program multiplies a few rows of W with x in float32; bound by the weight's bytes;
- `matmul`: tiles of W times xᵀ on the tensor cores, split over I where rows are few.

In the tile kernel both operands are widened to 16 bits, in which every value of 8 bits is exact: the sums are float32's, not the 22
bits that the float8 tensor cores keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.quantization import BLOCK
from custom_ops.triton_common import (
    launch_options,
    let_next_start,
    num_sms,
    split_counters,
    supports_pdl,
    wait_for_previous,
)

MAX_BLOCK_T = 64  # tokens of a tile; more are several tiles


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _row_sums(
    w_ptr, x_1I, rows_O, here_1I, in_features, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LANES: tl.constexpr
):
    """Σ w · x over the values that lie together in a thread: [O, I / LANES], in float32."""
    ok_1I = here_1I < in_features
    at_OI = w_ptr + rows_O.to(tl.int64)[:, None] * in_features + here_1I
    w_OI = tl.load(at_OI, mask=ok_1I, other=0.0, eviction_policy="evict_first").to(tl.float32)
    return tl.sum(tl.reshape(w_OI * x_1I, (BLOCK_O, BLOCK_I // LANES, LANES)), 2)


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, num_rows, in_features,
    HAS_X_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < num_rows
    safe_O = tl.where(ok_O, rows_O, 0)
    cols_1I = tl.arange(0, BLOCK_I)[None, :]
    scale_O = tl.load(scale_ptr + safe_O)  # no earlier kernel writes weights and their scales
    if SILU_MUL:
        up_scale_O = tl.load(scale_ptr + num_rows + safe_O)
    let_next_start(PDL)
    wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_O, BLOCK_I // LANES), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_O, BLOCK_I // LANES), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_I):
        here_1I = start + cols_1I
        x_1I = tl.load(x_ptr + here_1I, mask=here_1I < in_features, other=0.0).to(tl.float32)
        acc += _row_sums(w_ptr, x_1I, safe_O, here_1I, in_features, BLOCK_O, BLOCK_I, LANES)
        if SILU_MUL:
            acc_up += _row_sums(w_ptr, x_1I, num_rows + safe_O, here_1I, in_features, BLOCK_O, BLOCK_I, LANES)
    x_scale = 1.0
    if HAS_X_SCALE:
        x_scale = tl.load(x_scale_ptr)
    y_O = tl.sum(acc, 1) * (scale_O * x_scale)
    if HAS_BIAS:
        y_O += tl.load(bias_ptr + safe_O).to(tl.float32)
    if SILU_MUL:
        up_O = tl.sum(acc_up, 1) * (up_scale_O * x_scale)
        if HAS_BIAS:
            up_O += tl.load(bias_ptr + num_rows + safe_O).to(tl.float32)
        y_O = _silu(y_O) * up_O
    if HAS_RESIDUAL:
        y_O += tl.load(residual_ptr + safe_O).to(tl.float32)
    tl.store(out_ptr + rows_O, y_O.to(out_ptr.dtype.element_ty), mask=ok_O)


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
    num_tokens, num_rows, in_features, x_stride, residual_stride,
    HAS_X_SCALE: tl.constexpr, PER_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr, DOT: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    row_ok_O = rows_O < num_rows
    safe_rows_O = tl.where(row_ok_O, rows_O, 0).to(tl.int64)
    spots_T = tl.arange(0, BLOCK_T)
    tokens_T = token_tile * BLOCK_T + spots_T
    token_ok_T = tokens_T < num_tokens
    safe_tokens_T = tl.where(token_ok_T, tokens_T, 0).to(tl.int64)
    cols_I = tl.arange(0, BLOCK_I)
    num_groups = tl.cdiv(in_features, GROUP)
    let_next_start(PDL)
    wait_for_previous(PDL)
    acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    per_split = tl.cdiv(tl.cdiv(in_features, BLOCK_I), SPLITS) * BLOCK_I
    begin = split * per_split
    w_OI = w_ptr + safe_rows_O[:, None] * in_features + cols_I[None, :]
    up_OI = w_OI + num_rows.to(tl.int64) * in_features
    for start in tl.range(begin, tl.minimum(begin + per_split, in_features), BLOCK_I, num_stages=STAGES):
        here_I = start + cols_I
        ok_1I = here_I[None, :] < in_features
        w = tl.load(w_OI + start, mask=ok_1I, other=0.0, eviction_policy="evict_first").to(DOT)
        at_TI = x_ptr + safe_tokens_T[:, None] * x_stride + here_I[None, :]
        x_IT = tl.trans(tl.load(at_TI, mask=token_ok_T[:, None] & ok_1I, other=0.0).to(DOT))
        if SILU_MUL:
            up = tl.load(up_OI + start, mask=ok_1I, other=0.0, eviction_policy="evict_first").to(DOT)
        if PER_BLOCK:  # BLOCK_I = GROUP: a step is one group of inputs
            group = start // GROUP
            step_OT = tl.dot(w, x_IT, input_precision="ieee")
            x_scale_1T = tl.full((1, BLOCK_T), 1.0, dtype=tl.float32)
            if HAS_X_SCALE:
                x_scale_1T = tl.load(x_scale_ptr + safe_tokens_T * num_groups + group)[None, :]
            acc_OT += step_OT * tl.load(scale_ptr + safe_rows_O // GROUP * num_groups + group)[:, None] * x_scale_1T
            if SILU_MUL:
                up_scale_O = tl.load(scale_ptr + (num_rows + safe_rows_O) // GROUP * num_groups + group)
                acc_up_OT += tl.dot(up, x_IT, input_precision="ieee") * up_scale_O[:, None] * x_scale_1T
        else:
            acc_OT = tl.dot(w, x_IT, acc_OT, input_precision="ieee")
            if SILU_MUL:
                acc_up_OT = tl.dot(up, x_IT, acc_up_OT, input_precision="ieee")
    last = True
    if SPLITS > 1:
        # Partial sums of each split, then the last program of the tile to arrive adds them in order: the same bits every run.
        size = BLOCK_O * BLOCK_T
        spots_OT = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + spots_T[None, :]
        output_tile = token_tile * tl.num_programs(0) + tile
        mine = partial_ptr + (output_tile * SPLITS + split).to(tl.int64) * (2 * size)
        tl.store(mine + spots_OT, acc_OT)
        if SILU_MUL:
            tl.store(mine + size + spots_OT, acc_up_OT)
        tl.debug_barrier()
        last = tl.atomic_add(counter_ptr + output_tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = partial_ptr + (output_tile * SPLITS + other).to(tl.int64) * (2 * size)
                acc_OT += tl.load(theirs + spots_OT, cache_modifier=".cg")
                if SILU_MUL:
                    acc_up_OT += tl.load(theirs + size + spots_OT, cache_modifier=".cg")
            tl.store(counter_ptr + output_tile, 0)
    if last:
        if not PER_BLOCK:
            x_scale_1T = tl.full((1, BLOCK_T), 1.0, dtype=tl.float32)
            if HAS_X_SCALE:
                x_scale_1T = tl.load(x_scale_ptr + safe_tokens_T)[None, :]
            acc_OT *= tl.load(scale_ptr + safe_rows_O)[:, None] * x_scale_1T
            if SILU_MUL:
                acc_up_OT *= tl.load(scale_ptr + num_rows + safe_rows_O)[:, None] * x_scale_1T
        if HAS_BIAS:
            acc_OT += tl.load(bias_ptr + safe_rows_O).to(tl.float32)[:, None]
            if SILU_MUL:
                acc_up_OT += tl.load(bias_ptr + num_rows + safe_rows_O).to(tl.float32)[:, None]
        if SILU_MUL:
            acc_OT = _silu(acc_OT) * acc_up_OT
        ok_OT = row_ok_O[:, None] & token_ok_T[None, :]
        if HAS_RESIDUAL:
            residual = residual_ptr + safe_tokens_T[None, :] * residual_stride + rows_O[:, None]
            acc_OT += tl.load(residual, mask=ok_OT, other=0.0).to(tl.float32)
        out = out_ptr + safe_tokens_T[None, :] * num_rows + rows_O[:, None]
        tl.store(out, acc_OT.to(out_ptr.dtype.element_ty), mask=ok_OT)


def gemv_config(num_rows: int, in_features: int, silu_mul: bool) -> tuple[int, int]:
    """(rows a program, warps) of the 1-token kernel."""
    return (4, 4) if silu_mul or in_features < 4096 else (8, 8)


def matmul_config(
    num_tokens: int, num_rows: int, in_features: int, per_block: bool, sms: int
) -> tuple[int, int, int, int, int]:
    """(BLOCK_O, BLOCK_I, splits, stages, warps) of the tile kernel."""
    tiles = triton.cdiv(num_rows, 64) * triton.cdiv(num_tokens, MAX_BLOCK_T)
    splits = 1
    while 3 * tiles * splits < 2 * sms and splits < 8 and in_features >= 512 * splits:
        splits *= 2
    return 64, BLOCK if per_block or num_tokens > 32 else 2 * BLOCK, splits, 4, 4


def gemv(
    x_1I: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    scale_O: torch.Tensor,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_1O: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """y = f((x · x_scale) (scale · W)ᵀ + bias) + residual for one token, scales per output; f: SiLU-mul or nothing. → `dtype` [1, R]

    x_1I: rounded to 8 bits, with its scale [1, 1]; or as it is, without.
    """
    out_features, in_features = weight_OI.shape
    num_rows = out_features // 2 if silu_mul else out_features
    rows, warps = gemv_config(num_rows, in_features, silu_mul)
    out = torch.empty(1, num_rows, dtype=dtype, device=x_1I.device)
    pdl = supports_pdl(x_1I.device)
    _gemv_kernel[(triton.cdiv(num_rows, rows),)](
        x_1I, weight_OI, out, scale_O, x_scale, bias_O, residual_1O, num_rows, in_features,
        HAS_X_SCALE=x_scale is not None, HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_1O is not None,
        SILU_MUL=silu_mul, BLOCK_O=rows, BLOCK_I=32 * warps * 16, LANES=16, PDL=pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def matmul(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
    dtype: torch.dtype,
    config: tuple[int, int, int, int, int] | None = None,
) -> torch.Tensor:
    """As `gemv` for any number of tokens, with scales per output or per block. x_TI: rows may be strided. → `dtype` [T, R]

    config: in place of `matmul_config`'s.
    """
    num_tokens, per_block = x_TI.shape[0], scale.dim() == 2
    out_features, in_features = weight_OI.shape
    num_rows = out_features // 2 if silu_mul else out_features
    device = x_TI.device
    block_o, block_i, splits, stages, warps = config or matmul_config(
        num_tokens, num_rows, in_features, per_block, num_sms(device)
    )
    block_t = min(MAX_BLOCK_T, max(16, triton.next_power_of_2(num_tokens)))
    tiles, token_tiles = triton.cdiv(num_rows, block_o), triton.cdiv(num_tokens, block_t)
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=device)
    if not num_tokens:
        return out
    partial = counters = None
    if splits > 1:
        size = tiles * token_tiles * splits * 2 * block_o * block_t
        partial, counters = torch.empty(size, dtype=torch.float32, device=device), split_counters(device)
    # Values of 8 bits are exact in float16, and converting them to it is one instruction; other activations keep their type.
    dot_dtype = x_TI.dtype if x_scale is None else torch.float16
    pdl = supports_pdl(device)
    _matmul_kernel[(tiles, splits, token_tiles)](
        x_TI, weight_OI, out, scale, x_scale, bias_O, residual_TO, partial, counters, num_tokens, num_rows, in_features,
        x_TI.stride(0), residual_TO.stride(0) if residual_TO is not None else 0,
        HAS_X_SCALE=x_scale is not None, PER_BLOCK=per_block, HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_TO is not None, SILU_MUL=silu_mul, DOT=_TRITON_TYPES[dot_dtype], GROUP=BLOCK, BLOCK_T=block_t,
        BLOCK_O=block_o, BLOCK_I=block_i, SPLITS=splits, STAGES=stages, PDL=pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return out


_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

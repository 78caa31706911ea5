"""The Triton kernel of linears over 8-bit weights [O, I] for few tokens, with bias, SiLU-mul and residual in the same kernel.

Shape legend: T tokens, I input features, O output features (R: stored outputs, O or O / 2 with silu_mul), G groups of 128 inputs.

The kernel multiplies tiles of W by xᵀ on the tensor cores, split over I where there are few rows. x is quantized before, by
`triton_quantize.py`, and then 8-bit tensor cores multiply it. For float8 their sums have fewer bits than float32, so the sums of every 128
inputs are added in float32. If x is not quantized, the weight is converted to x's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.quantization import BLOCK
from compile_and_serve.custom_ops.quantized.triton_epilogue import add_splits, store_outputs
from compile_and_serve.custom_ops.triton_common import (
    TRITON_TYPES,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    prefetch_rows_l2,
    split_counters,
    supports_pdl,
    wait_for_previous,
)

MAX_BLOCK_T = 64  # tokens per tile


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
    num_tokens, num_rows, in_features, x_stride, residual_stride,
    HAS_X_SCALE: tl.constexpr, PER_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr, DOT: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PREFETCH_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    row_ok_O = rows_O < num_rows
    safe_rows_O = tl.where(row_ok_O, rows_O, 0).to(tl.int64)
    tokens_T = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    token_ok_T = tokens_T < num_tokens
    safe_tokens_T = tl.where(token_ok_T, tokens_T, 0).to(tl.int64)
    cols_I = tl.arange(0, BLOCK_I)
    num_groups = tl.cdiv(in_features, GROUP)
    per_split = tl.cdiv(tl.cdiv(in_features, BLOCK_I), SPLITS) * BLOCK_I
    begin = split * per_split
    up_ptr = w_ptr + num_rows.to(tl.int64) * in_features
    let_next_start(PDL)
    if PDL:  # prefetch the first weights into L2 while the previous kernel still runs
        if (begin + PREFETCH_I <= in_features) & (in_features % 16 == 0):
            prefetch_rows_l2(w_ptr + safe_rows_O * in_features + begin, PREFETCH_I)
            if SILU_MUL:
                prefetch_rows_l2(up_ptr + safe_rows_O * in_features + begin, PREFETCH_I)
    wait_for_previous(PDL)
    # Float8 tensor cores keep fewer bits of a sum than float32 has. After this many inputs, it is added to a sum in float32.
    IMPRECISE: tl.constexpr = 128 if tl.float8e4nv == DOT else 0
    SUMS: tl.constexpr = tl.int32 if tl.int8 == DOT else tl.float32
    acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32 if PER_BLOCK else SUMS)
    acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32 if PER_BLOCK else SUMS)
    w_OI = w_ptr + safe_rows_O[:, None] * in_features + cols_I[None, :]
    up_OI = up_ptr + safe_rows_O[:, None] * in_features + cols_I[None, :]
    for start in tl.range(begin, tl.minimum(begin + per_split, in_features), BLOCK_I, num_stages=STAGES):
        here_I = start + cols_I
        ok_1I = here_I[None, :] < in_features
        w = tl.load(w_OI + start, mask=ok_1I, other=0.0, eviction_policy="evict_first").to(DOT)
        at_TI = x_ptr + safe_tokens_T[:, None] * x_stride + here_I[None, :]
        x_IT = tl.trans(tl.load(at_TI, mask=token_ok_T[:, None] & ok_1I, other=0.0).to(DOT))
        if SILU_MUL:
            up = tl.load(up_OI + start, mask=ok_1I, other=0.0, eviction_policy="evict_first").to(DOT)
        if PER_BLOCK:  # BLOCK_I = GROUP: an iteration is one group of inputs
            group = start // GROUP
            zeros_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=SUMS)
            step_OT = tl.dot(w, x_IT, zeros_OT, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=SUMS)
            x_scale_1T = tl.full((1, BLOCK_T), 1.0, dtype=tl.float32)
            if HAS_X_SCALE:
                x_scale_1T = tl.load(x_scale_ptr + safe_tokens_T * num_groups + group)[None, :]
            scale_O = tl.load(scale_ptr + safe_rows_O // GROUP * num_groups + group)
            acc_OT += step_OT.to(tl.float32) * scale_O[:, None] * x_scale_1T
            if SILU_MUL:
                up_scale_O = tl.load(scale_ptr + (num_rows + safe_rows_O) // GROUP * num_groups + group)
                step_OT = tl.dot(up, x_IT, zeros_OT, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=SUMS)
                acc_up_OT += step_OT.to(tl.float32) * up_scale_O[:, None] * x_scale_1T
        else:
            acc_OT = tl.dot(w, x_IT, acc_OT, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=SUMS)
            if SILU_MUL:
                acc_up_OT = tl.dot(up, x_IT, acc_up_OT, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=SUMS)
    acc_OT = acc_OT.to(tl.float32)
    acc_up_OT = acc_up_OT.to(tl.float32)
    last = True
    if SPLITS > 1:
        output_tile = token_tile * tl.num_programs(0) + tile
        acc_OT, acc_up_OT, last = add_splits(acc_OT, acc_up_OT, partial_ptr, counter_ptr, output_tile, split, SILU_MUL, SPLITS)
    if last:
        if not PER_BLOCK:
            x_scale_1T = tl.full((1, BLOCK_T), 1.0, dtype=tl.float32)
            if HAS_X_SCALE:
                x_scale_1T = tl.load(x_scale_ptr + safe_tokens_T)[None, :]
            acc_OT *= tl.load(scale_ptr + safe_rows_O)[:, None] * x_scale_1T
            if SILU_MUL:
                acc_up_OT *= tl.load(scale_ptr + num_rows + safe_rows_O)[:, None] * x_scale_1T
        store_outputs(
            acc_OT,
            acc_up_OT,
            bias_ptr,
            residual_ptr,
            out_ptr,
            rows_O,
            row_ok_O,
            safe_rows_O,
            safe_tokens_T,
            token_ok_T,
            num_rows,
            residual_stride,
            HAS_BIAS,
            HAS_RESIDUAL,
            SILU_MUL,
        )


def matmul_config(
    num_tokens: int, num_rows: int, in_features: int, silu_mul: bool, x_bytes: int, per_block: bool, sms: int
) -> tuple[int, int, int, int, int]:
    """(BLOCK_O, BLOCK_I, splits, stages, warps) of the tile kernel. x_bytes: of a value of x, 1 if it is quantized."""
    tiles = cdiv(num_rows, 64) * cdiv(num_tokens, MAX_BLOCK_T)
    splits = 1
    while 3 * tiles * splits < 2 * sms and splits < 8 and in_features >= 512 * splits:
        splits *= 2
    if per_block:
        return 64, BLOCK, splits, 6 if x_bytes == 1 else 4, 4
    if x_bytes == 4:
        return 64, 64, splits, 3, 4
    if x_bytes == 2:
        return 64, BLOCK if num_tokens > 32 else 2 * BLOCK, splits, 4, 4
    if num_tokens > 32 or (num_tokens > 16 and silu_mul):  # shared memory does not hold wider tiles of x and two tiles of W
        return 64, 256, splits, 4, 4
    return 64, 512, splits, 3, 4


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
    """y = f((x · x_scale) (scale · W)ᵀ + bias) + residual, where f is SiLU-mul with silu_mul. → `dtype` [T, R]

    x_TI: quantized to 8 bits, with scales, or not quantized, without scales; rows may be strided. scale: per output or per block.
    config: replaces `matmul_config`'s.
    """
    num_tokens, per_block = x_TI.shape[0], scale.dim() == 2
    out_features, in_features = weight_OI.shape
    num_rows = out_features // 2 if silu_mul else out_features
    device = x_TI.device
    block_o, block_i, splits, stages, warps = config or matmul_config(
        num_tokens, num_rows, in_features, silu_mul, x_TI.element_size(), per_block, num_sms(device)
    )
    block_t = min(MAX_BLOCK_T, max(16, next_power_of_2(num_tokens)))
    tiles, token_tiles = cdiv(num_rows, block_o), cdiv(num_tokens, block_t)
    out = torch.empty(num_tokens, num_rows, dtype=dtype, device=device)
    if not num_tokens:
        return out
    partial = counters = None
    if splits > 1:
        size = tiles * token_tiles * splits * 2 * block_o * block_t
        partial, counters = torch.empty(size, dtype=torch.float32, device=device), split_counters(device)
    pdl = supports_pdl(device)
    launch(
        _matmul_kernel, (tiles, splits, token_tiles),
        x_TI, weight_OI, out, scale, x_scale, bias_O, residual_TO, partial, counters, num_tokens, num_rows, in_features,
        x_TI.stride(0), residual_TO.stride(0) if residual_TO is not None else 0,
        HAS_X_SCALE=x_scale is not None, PER_BLOCK=per_block, HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_TO is not None, SILU_MUL=silu_mul, DOT=TRITON_TYPES[x_TI.dtype], GROUP=BLOCK, BLOCK_T=block_t,
        BLOCK_O=block_o, BLOCK_I=block_i, SPLITS=splits, STAGES=stages, PREFETCH_I=1024,
        PDL=pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return out

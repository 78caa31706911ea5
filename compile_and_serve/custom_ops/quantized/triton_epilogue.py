"""What follows the products in the tile kernels of quantized linears: sums of splits, bias, SiLU-mul, residual and store.

Shape legend: T tokens and O outputs of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_and_serve.custom_ops.triton_common import silu


@triton.jit
def add_splits(acc_OT, acc_up_OT, partial_ptr, counter_ptr, output_tile, split, SILU_MUL: tl.constexpr, SPLITS: tl.constexpr):
    """Stores the split's sums. The last program of the tile adds them in order, so that every run has the same bits.

    partial_ptr: float32 [tiles, SPLITS, 2, O, T]. counter_ptr: `split_counters`. → sums, sums of the up half, whether this program is
    the last
    """
    BLOCK_O: tl.constexpr = acc_OT.shape[0]
    BLOCK_T: tl.constexpr = acc_OT.shape[1]
    size = BLOCK_O * BLOCK_T
    spots_OT = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    mine = partial_ptr + (output_tile * SPLITS + split).to(tl.int64) * (2 * size)
    tl.store(mine + spots_OT, acc_OT)
    if SILU_MUL:
        tl.store(mine + size + spots_OT, acc_up_OT)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + output_tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if is_last:
        acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
        acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
        for other in tl.static_range(SPLITS):
            theirs = partial_ptr + (output_tile * SPLITS + other).to(tl.int64) * (2 * size)
            acc_OT += tl.load(theirs + spots_OT, cache_modifier=".cg")
            if SILU_MUL:
                acc_up_OT += tl.load(theirs + size + spots_OT, cache_modifier=".cg")
        tl.store(counter_ptr + output_tile, 0)
    return acc_OT, acc_up_OT, is_last


@triton.jit
def store_outputs(
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
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
):
    """out = f(sums + bias) + residual, where f is SiLU-mul with SILU_MUL; rounded once."""
    if HAS_BIAS:
        acc_OT += tl.load(bias_ptr + safe_rows_O).to(tl.float32)[:, None]
        if SILU_MUL:
            acc_up_OT += tl.load(bias_ptr + num_rows + safe_rows_O).to(tl.float32)[:, None]
    if SILU_MUL:
        acc_OT = silu(acc_OT) * acc_up_OT
    ok_OT = row_ok_O[:, None] & token_ok_T[None, :]
    if HAS_RESIDUAL:
        residual = residual_ptr + safe_tokens_T[None, :] * residual_stride + rows_O[:, None]
        acc_OT += tl.load(residual, mask=ok_OT, other=0.0).to(tl.float32)
    out = out_ptr + safe_tokens_T[None, :] * num_rows + rows_O[:, None]
    tl.store(out, acc_OT.to(out_ptr.dtype.element_ty), mask=ok_OT)

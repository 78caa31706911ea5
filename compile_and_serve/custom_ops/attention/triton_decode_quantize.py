"""What the decode kernel does besides where its output is to come rounded to 8 bits, as `quantize_rows` would round it afterwards.

Shape legend: S sequences, T tokens, H query heads, K key/value heads, E head size, I = H · E features of a row, G groups of 128 of them,
N heads that a program has at hand.

A row's heads are computed by several programs. Where a head needs no other's values to be rounded it is rounded as it is stored: with
a scale that is given, or where groups of 128 features end with heads. Otherwise the last program of the sequence to store its
heads reads the whole row back.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from compile_and_serve.custom_ops.quantized.quantization import BLOCK, LARGEST, RoundTo
from compile_and_serve.custom_ops.quantized.triton_quantize import (
    count_nan,
    scale_of,
    scales_of,
    store_quantized,
    to_eight_bits,
)
from compile_and_serve.custom_ops.triton_common import SPLIT_COUNTERS, next_power_of_2

_FEATURES_A_WARP = 1024  # of a row that are read back at once: 32 a thread


@triton.jit
def store_rounded_heads(
    out_NE, heads_N, ok_N, token, rounded_ptr, scale_ptr, input_scale_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, N: tl.constexpr, BLOCK_E: tl.constexpr,
    IS_STATIC: tl.constexpr, LARGEST_VALUE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store whole heads, out_NE as they are stored unrounded, and their scales; GROUP divides HEAD_DIM = BLOCK_E, or IS_STATIC."""
    dtype: tl.constexpr = rounded_ptr.dtype.element_ty
    x_NE = out_NE.to(tl.float32)
    if IS_STATIC:
        scale = tl.load(input_scale_ptr).to(tl.float32)
        tl.store(scale_ptr + token + heads_N * 0, scale + tl.zeros((N,), dtype=tl.float32), mask=heads_N == 0)
        values_NE = tl.minimum(tl.maximum(x_NE * tl.div_rn(1.0, scale), -LARGEST_VALUE), LARGEST_VALUE)
        # No other program knows of this head's NaN: they stay what they are, which float8 can.
        values_NE = tl.where(x_NE != x_NE, x_NE, values_NE).to(dtype)
    else:
        PARTS: tl.constexpr = HEAD_DIM // GROUP
        x_GB = tl.reshape(x_NE, (N * PARTS, GROUP))
        scale_G = scales_of(x_GB, None, False, LARGEST_VALUE)
        values_NE = tl.reshape(to_eight_bits(x_GB, scale_G[:, None], dtype, LARGEST_VALUE), (N, BLOCK_E))
        groups_NP = heads_N[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        scale_NP = tl.reshape(scale_G, (N, PARTS))
        tl.store(scale_ptr + token * (NUM_HEADS * PARTS) + groups_NP, scale_NP, mask=ok_N[:, None])
    cols_E = tl.arange(0, BLOCK_E)
    at_NE = rounded_ptr + token * (NUM_HEADS * HEAD_DIM) + heads_N[:, None] * HEAD_DIM + cols_E[None, :]
    tl.store(at_NE, values_NE, mask=ok_N[:, None] & (cols_E < HEAD_DIM)[None, :])


@triton.jit
def round_row_when_complete(
    token, counter, out_ptr, rounded_ptr, scale_ptr, input_scale_ptr, ARRIVALS: tl.constexpr, NUM_FEATURES: tl.constexpr,
    IS_STATIC: tl.constexpr, LARGEST_VALUE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Count this program, which has stored its heads of the token's row; the last of ARRIVALS rounds the row.

    GROUP: features that share a scale, 0: all. WIDTH: a power of two, a multiple of GROUP: how many are read at once.
    """
    tl.debug_barrier()
    arrived = 0
    if ARRIVALS > 1:
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == ARRIVALS - 1:
        if ARRIVALS > 1:
            tl.store(counter, 0)
        _round_row(
            token, out_ptr, rounded_ptr, scale_ptr, input_scale_ptr, NUM_FEATURES, IS_STATIC, LARGEST_VALUE, GROUP, WIDTH
        )  # fmt: skip


@triton.jit
def _round_row(
    token, out_ptr, rounded_ptr, scale_ptr, input_scale_ptr,
    NUM_FEATURES: tl.constexpr, IS_STATIC: tl.constexpr, LARGEST_VALUE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if WIDTH >= NUM_FEATURES:
        cols_I = tl.arange(0, WIDTH)
        x_I = _load_part(out_ptr, token, cols_I, NUM_FEATURES)
        store_quantized(
            x_I, token, cols_I, cols_I < NUM_FEATURES, rounded_ptr, scale_ptr, input_scale_ptr, NUM_FEATURES, IS_STATIC,
            LARGEST_VALUE, GROUP if GROUP > 0 else WIDTH, WIDTH,
        )  # fmt: skip
    elif GROUP == 0:
        _round_wide_row(
            token, out_ptr, rounded_ptr, scale_ptr, input_scale_ptr, NUM_FEATURES, IS_STATIC, LARGEST_VALUE, WIDTH
        )  # fmt: skip
    else:
        NUM_GROUPS: tl.constexpr = (NUM_FEATURES + GROUP - 1) // GROUP
        for part in tl.static_range((NUM_FEATURES + WIDTH - 1) // WIDTH):
            cols_I = part * WIDTH + tl.arange(0, WIDTH)
            x_GB = tl.reshape(_load_part(out_ptr, token, cols_I, NUM_FEATURES), (WIDTH // GROUP, GROUP))
            scale_G = scales_of(x_GB, None, False, LARGEST_VALUE)
            values_GB = to_eight_bits(x_GB, scale_G[:, None], rounded_ptr.dtype.element_ty, LARGEST_VALUE)
            at_I = rounded_ptr + token * NUM_FEATURES + cols_I
            tl.store(at_I, tl.reshape(values_GB, (WIDTH,)), mask=cols_I < NUM_FEATURES)
            groups = part * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
            tl.store(scale_ptr + token * NUM_GROUPS + groups, scale_G, mask=groups < NUM_GROUPS)


@triton.jit
def _round_wide_row(
    token, out_ptr, rounded_ptr, scale_ptr, input_scale_ptr,
    NUM_FEATURES: tl.constexpr, IS_STATIC: tl.constexpr, LARGEST_VALUE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """With one scale for all of it; read twice, once to find the scale."""
    one_1 = tl.zeros((1,), dtype=tl.int32)
    largest_1, num_nan_1 = tl.zeros((1,), dtype=tl.float32), one_1
    for part in tl.static_range((NUM_FEATURES + WIDTH - 1) // WIDTH):
        x_1I = _load_part(out_ptr, token, part * WIDTH + tl.arange(0, WIDTH), NUM_FEATURES)[None, :]
        largest_1 = tl.maximum(largest_1, tl.max(tl.abs(x_1I), 1))
        num_nan_1 += count_nan(x_1I)
    scale_1 = scale_of(largest_1, input_scale_ptr, IS_STATIC, LARGEST_VALUE)
    scale_1 = tl.where(num_nan_1 > 0, float("nan"), scale_1)
    tl.store(scale_ptr + token + one_1, scale_1)
    for part in tl.static_range((NUM_FEATURES + WIDTH - 1) // WIDTH):
        cols_I = part * WIDTH + tl.arange(0, WIDTH)
        x_1I = _load_part(out_ptr, token, cols_I, NUM_FEATURES)[None, :]
        values_1I = to_eight_bits(x_1I, scale_1[:, None], rounded_ptr.dtype.element_ty, LARGEST_VALUE)
        at_I = rounded_ptr + token * NUM_FEATURES + cols_I
        tl.store(at_I, tl.reshape(values_1I, (WIDTH,)), mask=cols_I < NUM_FEATURES)


@triton.jit
def _load_part(out_ptr, token, cols_I, NUM_FEATURES: tl.constexpr):
    """Of a row that other programs stored, which L1 knows nothing of."""
    at_I = out_ptr + token * NUM_FEATURES + cols_I
    return tl.load(at_I, mask=cols_I < NUM_FEATURES, other=0.0, cache_modifier=".cg").to(tl.float32)


def can_round(num_seqs: int, num_kv_heads: int) -> bool:
    """Whether there are counters for that many sequences and heads."""
    return num_seqs * (num_kv_heads + 1) <= SPLIT_COUNTERS


def rounds_heads(round_to: RoundTo, head_dim: int) -> bool:
    """Whether a head is rounded without those of other programs."""
    if round_to.input_scale is not None:
        return round_to.dtype.is_floating_point  # which can hold NaN
    return round_to.per_group and head_dim % BLOCK == 0


def rounding_constants(
    round_to: RoundTo | None, num_heads: int, head_dim: int, num_warps: int
) -> dict[str, Any]:  # fmt: skip
    """Constants of the decode kernel; None: its output is not rounded."""
    if round_to is None:
        return {
            "ROUNDS_HEADS": False, "ROUNDS_ROW": False, "IS_STATIC": False, "LARGEST_VALUE": None, "ROUND_GROUP": None,
            "ROUND_WIDTH": None,
        }  # fmt: skip
    in_place = rounds_heads(round_to, head_dim)
    width = min(max(BLOCK, next_power_of_2(num_heads * head_dim)), _FEATURES_A_WARP * num_warps)
    return {
        "ROUNDS_HEADS": in_place, "ROUNDS_ROW": not in_place, "IS_STATIC": round_to.input_scale is not None,
        "LARGEST_VALUE": LARGEST[round_to.dtype], "ROUND_GROUP": BLOCK if round_to.per_group else 0, "ROUND_WIDTH": width,
    }  # fmt: skip

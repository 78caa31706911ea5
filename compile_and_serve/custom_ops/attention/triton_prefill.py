"""Paged causal attention of several query tokens per sequence (prompts and prompt chunks), in the style of FlashAttention.

Shape legend: T tokens, S sequences, H query heads, K key/value heads, E head size, N cache blocks, P tokens per block,
M block-table columns, Q query tokens per tile, C tokens per tile of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, Scores
from compile_and_serve.custom_ops.attention.triton_int8 import UNIT, from_cache, load_scales
from compile_and_serve.custom_ops.attention.triton_scores import LOG2_E, first_visible, load_head_log2, score_log2
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import next_power_of_2, to_products


@triton.jit
def _attend_tile(
    start, lower, stop, q_QE, max_Q, sum_Q, acc_QE, positions_Q, last_Q, base, table, cols_E, slope, block_stride, scale_log2, cap_log2,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TO_VALUES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    MASKS_BEGIN: tl.constexpr, MASKS_END: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys start … start + C - 1 from `lower` on and before `stop`. → (maxima, sums, weighted sums)

    last_Q: the last key that each row attends to.
    MASKS_BEGIN: `lower`, or where some row's window begins, is in the tile. MASKS_END: some rows come before some keys, or `stop` is
    in the tile.
    """
    product: tl.constexpr = q_QE.dtype
    tokens_C = start + tl.arange(0, BLOCK_C)
    ok_C = (tokens_C >= lower) & (tokens_C < stop)
    if MASKS_BEGIN or MASKS_END:
        block_C = tl.load(table + tokens_C // BLOCK_SIZE, mask=ok_C, other=0).to(tl.int64)
    else:
        block_C = tl.load(table + tokens_C // BLOCK_SIZE).to(tl.int64)
    at_CE = base + (block_C * block_stride + (tokens_C % BLOCK_SIZE) * HEAD_DIM)[:, None] + cols_E[None, :]
    if MASKS_BEGIN or MASKS_END:
        ok_CE = ok_C[:, None] & (cols_E < HEAD_DIM)[None, :]
        k_CE = from_cache(tl.load(at_CE, mask=ok_CE, other=0.0), product)
        v_CE = from_cache(tl.load(at_CE + TO_VALUES, mask=ok_CE, other=0.0), product)
    elif BLOCK_E == HEAD_DIM:
        k_CE = from_cache(tl.load(at_CE), product)
        v_CE = from_cache(tl.load(at_CE + TO_VALUES), product)
    else:
        k_CE = from_cache(tl.load(at_CE, mask=(cols_E < HEAD_DIM)[None, :], other=0.0), product)
        v_CE = from_cache(tl.load(at_CE + TO_VALUES, mask=(cols_E < HEAD_DIM)[None, :], other=0.0), product)
    scores_QC = tl.dot(q_QE, tl.trans(k_CE), input_precision="ieee")
    is_int8: tl.constexpr = base.dtype.element_ty == tl.int8
    if is_int8:
        k_scale_C, v_scale_C = load_scales(base + block_C * block_stride, tokens_C % BLOCK_SIZE, ok_C, TO_VALUES, BLOCK_SIZE, HEAD_DIM)
        scores_QC *= k_scale_C[None, :]
    if MASKS_BEGIN or MASKS_END or HAS_CAP or HAS_ALIBI:
        distance_QC = (tokens_C[None, :] - positions_Q[:, None]).to(tl.float32)
        scores_QC = score_log2(scores_QC, distance_QC, slope, scale_log2, cap_log2, HAS_CAP, HAS_ALIBI)
        if MASKS_BEGIN:
            seen_QC = tokens_C[None, :] >= first_visible(positions_Q, WINDOW, CHUNKED)[:, None]
            scores_QC = tl.where(seen_QC, scores_QC, float("-inf"))
        if MASKS_END:
            scores_QC = tl.where(tokens_C[None, :] <= last_Q[:, None], scores_QC, float("-inf"))
        # A row may attend to no key of the tile. A finite maximum keeps it from becoming NaN.
        new_max_Q = tl.maximum(tl.maximum(max_Q, tl.max(scores_QC, 1)), -1e30)
        probs_QC = tl.exp2(scores_QC - new_max_Q[:, None])
    else:
        new_max_Q = tl.maximum(max_Q, tl.max(scores_QC, 1) * scale_log2)
        probs_QC = tl.exp2(scores_QC * scale_log2 - new_max_Q[:, None])
    shrink_Q = tl.exp2(max_Q - new_max_Q)
    sum_Q = sum_Q * shrink_Q + tl.sum(probs_QC, 1)
    if is_int8:
        probs_QC *= v_scale_C[None, :]
    acc_QE = tl.dot(probs_QC.to(product), v_CE, acc_QE * shrink_Q[:, None], input_precision="ieee")
    return new_max_Q, sum_Q, acc_QE


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill_kernel(
    q_ptr, kv_ptr, out_ptr, start_loc_ptr, seq_lens_ptr, block_table_ptr, sinks_ptr, slopes_ptr, ahead_ptr,
    block_stride, table_stride, num_seqs, scale_log2, cap_log2,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, SKIP_SINGLE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
):  # fmt: skip
    # The last tiles of a sequence attend to the most keys: they start first.
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    is_int8: tl.constexpr = kv_ptr.dtype.element_ty == tl.int8
    PAGE: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4 if is_int8 else HEAD_DIM)  # keys or values of one head in a block
    TO_VALUES: tl.constexpr = NUM_KV_HEADS * PAGE
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    is_float8: tl.constexpr = kv_ptr.dtype.element_ty == tl.float8e4nv
    product: tl.constexpr = tl.float16 if (is_float8 or is_int8) and dtype == tl.bfloat16 else dtype
    # Sequence s starts at tile start_loc[s] // Q + s or before. Find the last s whose first tile is not after this one.
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(start_loc_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    seq = low
    first = tl.load(start_loc_ptr + seq)
    query_len = tl.load(start_loc_ptr + seq + 1) - first
    begin = (tile - (first // BLOCK_Q + seq)) * BLOCK_Q
    if begin >= query_len:
        return
    if SKIP_SINGLE:
        if query_len == 1:
            return
    seq_len = tl.load(seq_lens_ptr + seq)
    offset = seq_len - query_len
    rows_Q, cols_E = begin + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_E)
    positions_Q = offset + rows_Q
    ok_QE = (rows_Q < query_len)[:, None] & (cols_E < HEAD_DIM)[None, :]
    at_QE = (first + rows_Q).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + cols_E[None, :]
    q_QE = to_products(tl.load(q_ptr + at_QE, mask=ok_QE, other=0.0), product)
    max_Q = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    sum_Q = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    acc_QE = tl.zeros((BLOCK_Q, BLOCK_E), dtype=tl.float32)
    head_1 = head + tl.zeros((1,), dtype=tl.int32)
    slope_11 = load_head_log2(slopes_ptr, head_1, head_1 >= 0, HAS_ALIBI)[:, None]
    if HAS_SINKS:
        max_Q = load_head_log2(sinks_ptr, head_1, head_1 >= 0, HAS_SINKS) + tl.zeros((BLOCK_Q,), dtype=tl.float32)
        sum_Q += 1.0
    base = kv_ptr + kv_head * PAGE
    table = block_table_ptr + seq * table_stride
    # Every row of the tile attends to the keys from `inner` to `whole`: they need no mask. With a window, no row attends to keys
    # before `outer`, and some do not attend to those before `inner`.
    end = tl.minimum(seq_len, offset + begin + BLOCK_Q)
    last_Q = positions_Q
    if HAS_AHEAD:
        last_Q += tl.load(ahead_ptr + first + rows_Q, mask=rows_Q < query_len, other=0)
        end = tl.minimum(seq_len, tl.maximum(end, tl.max(last_Q, 0) + 1))
    whole = (offset + begin + 1) // BLOCK_C * BLOCK_C
    lower, inner = 0, 0
    if WINDOW > 0:
        lower = first_visible(offset + begin, WINDOW, CHUNKED)
        outer = lower // BLOCK_C * BLOCK_C
        inner = tl.cdiv(first_visible(offset + begin + BLOCK_Q - 1, WINDOW, CHUNKED), BLOCK_C) * BLOCK_C
        whole = tl.maximum(whole, outer)
        inner = tl.minimum(inner, whole)
        for start in tl.range(outer, inner, BLOCK_C, num_stages=STAGES):
            max_Q, sum_Q, acc_QE = _attend_tile(
                start, lower, end, q_QE, max_Q, sum_Q, acc_QE, positions_Q, last_Q, base, table, cols_E, slope_11, block_stride, scale_log2,
                cap_log2, BLOCK_SIZE, HEAD_DIM, TO_VALUES, BLOCK_C, BLOCK_E, WINDOW, CHUNKED, HAS_CAP, HAS_ALIBI, True, False,
            )  # fmt: skip
    for start in tl.range(inner, whole, BLOCK_C, num_stages=STAGES):
        max_Q, sum_Q, acc_QE = _attend_tile(
            start, lower, end, q_QE, max_Q, sum_Q, acc_QE, positions_Q, last_Q, base, table, cols_E, slope_11, block_stride, scale_log2,
            cap_log2, BLOCK_SIZE, HEAD_DIM, TO_VALUES, BLOCK_C, BLOCK_E, WINDOW, CHUNKED, HAS_CAP, HAS_ALIBI, False, False,
        )  # fmt: skip
    for start in tl.range(whole, end, BLOCK_C, num_stages=1):
        max_Q, sum_Q, acc_QE = _attend_tile(
            start, lower, end, q_QE, max_Q, sum_Q, acc_QE, positions_Q, last_Q, base, table, cols_E, slope_11, block_stride, scale_log2,
            cap_log2, BLOCK_SIZE, HEAD_DIM, TO_VALUES, BLOCK_C, BLOCK_E, WINDOW, CHUNKED, HAS_CAP, HAS_ALIBI, WINDOW > 0, True,
        )  # fmt: skip
    if is_int8:
        acc_QE /= UNIT
    tl.store(out_ptr + at_QE, (acc_QE / sum_Q[:, None]).to(dtype), mask=ok_QE)


def prefill_attention(
    q_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    query_start_loc: torch.Tensor,
    seq_lens_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    out_THE: torch.Tensor,
    num_seqs: int,
    skip_single: bool = False,
    window: int | None = None,
    chunked: bool = False,
    scores: Scores = PLAIN_SCORES,
    config: tuple[int, int, int, int] | None = None,
) -> None:
    """out = softmax(scale · q kᵀ + mask) v over the cache, which already holds the step's own keys and values.

    q_THE: contiguous [T, H, E]; kv_cache: [N, 2, K, P, E], q's dtype, float8_e4m3fn or int8; the metadata's tensors as in
    `AttentionMetadata`. skip_single: skip sequences with one query token, which `decode_attention` runs. window, chunked: as in
    `AttentionMetadata`. config: (query tile, key tile, stages, warps).
    """
    num_tokens, num_heads, head_dim = q_THE.shape
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    block_e = max(16, next_power_of_2(head_dim))
    block_q, block_c, stages, warps = config or ((64, 64, 3, 4) if block_e <= 128 else (64, 32, 2, 4))
    if q_THE.dtype == torch.float32:
        block_q, block_c, stages = min(block_q, 64), min(block_c, 32), min(stages, 2)
    launch(
        _prefill_kernel, (num_heads, num_tokens // block_q + num_seqs),
        q_THE, kv_cache, out_THE, query_start_loc, seq_lens_S, block_table_SM, scores.sinks_H, scores.alibi_slopes_H,
        scores.ahead_T,
        kv_cache.stride(0), block_table_SM.stride(0), num_seqs, scale * LOG2_E, scores.soft_cap * LOG2_E,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_Q=block_q, BLOCK_C=block_c, BLOCK_E=block_e, STAGES=stages, SKIP_SINGLE=skip_single,
        WINDOW=window or 0, CHUNKED=chunked, HAS_CAP=scores.soft_cap > 0, HAS_SINKS=scores.sinks_H is not None,
        HAS_ALIBI=scores.alibi_slopes_H is not None, HAS_AHEAD=scores.ahead_T is not None, num_warps=warps,
    )  # fmt: skip

"""Paged attention of one query token per sequence, with the layer's head norms, rotary embedding and KV write in the same kernel.

Shape legend: T tokens, S sequences, H query heads, K key/value heads, G = H / K padded to BLOCK_G, E head size, R = E / 2,
N cache blocks, P tokens per block, M block-table columns, C tokens per tile of keys.

A program computes the G query heads of one key/value head over one split of a sequence's tokens. The last split also computes the new
token's key and value: it writes them to the cache and starts its running softmax from them, so it does not read them back. (Without
IS_CAUSAL the new token is anywhere among the others. Its key and value are written before the kernel, which reads all keys from the cache.)
If a sequence has several splits, the last program to finish combines them. The grid depends only on the number of sequences and heads, not
on lengths, so that a captured launch serves every length. With a window, the splits are of the window's tokens: nothing before it is read.

Programs start in the grid's order: heads, then sequences, then splits. Sequences come longest first (`BatchLayout`), so that the tail is
short.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, Scores
from compile_and_serve.custom_ops.attention.triton_int8 import UNIT, from_cache, int8_scale, load_scales, scales_of, to_int8
from compile_and_serve.custom_ops.attention.triton_rope import heads_contiguous, load_norm_rope
from compile_and_serve.custom_ops.attention.triton_scores import LOG2_E, first_visible, load_head_log2, score_log2
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import (
    SPLIT_COUNTERS,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    prefetch_rows_l2,
    split_counters,
    supports_pdl,
    to_cache,
    to_products,
    wait_for_previous,
)

MAX_SPLITS = 16
UNROLL = tl.constexpr(4)  # splits that are combined at once


@triton.jit
def unpack_pairs(pairs, IS_INT8: tl.constexpr, PDL: tl.constexpr):
    """Pairs of 8-bit values in int16 → the low bytes' values and the high bytes' values, both in float16.

    PDL stands for a Hopper or newer device, which can run the assembly below.
    """
    if PDL and IS_INT8:  # 1024 + (x + 128) has the bits 0x6400 + (x + 128)
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 biased, base;
            xor.b32 biased, $2, 0x80808080;
            mov.b32 base, 0x64806480;
            prmt.b32 $0, biased, 0x64646464, 0x4240;
            prmt.b32 $1, biased, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, $0, base;
            sub.rn.f16x2 $1, $1, base;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif PDL:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lows, highs;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lows, highs}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lows;
            cvt.rn.f16x2.e4m3x2 $1, highs;
            }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        value: tl.constexpr = tl.int8 if IS_INT8 else tl.float8e4nv
        low = (pairs & 0xFF).to(tl.int8).to(value, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 0xFF).to(tl.int8).to(value, bitcast=True).to(tl.float16)
    return low, high


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, kv_ptr, out_ptr, partial_ptr, counter_ptr,
    start_loc_ptr, seq_lens_ptr, block_table_ptr, slot_ptr, sinks_ptr, slopes_ptr,
    q_stride, k_stride, v_stride, cos_stride, block_stride, table_stride, num_seqs, scale_log2, cap_log2, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, IS_CAUSAL: tl.constexpr, PDL: tl.constexpr,
    RESIDENT: tl.constexpr,  # not read: the kernel of one sequence is one of its own, whose shared memory `launch` limits
):  # fmt: skip
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    is_int8: tl.constexpr = kv_ptr.dtype.element_ty == tl.int8
    PAGE: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4 if is_int8 else HEAD_DIM)  # keys or values of one head in a block
    TO_VALUES: tl.constexpr = NUM_KV_HEADS * PAGE
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    is_float8: tl.constexpr = kv_ptr.dtype.element_ty == tl.float8e4nv
    HALVES: tl.constexpr = BLOCK_E // 2
    product: tl.constexpr = tl.float16 if (is_float8 or is_int8) and dtype == tl.bfloat16 else dtype
    # The values are the second operand of a product, so they are transposed on their way out of shared memory. One instruction does that
    # for many elements, but only for elements of 16 bits. So 8-bit values are loaded in pairs: even and odd columns have sums of their own.
    is_paired: tl.constexpr = (is_float8 or is_int8) and product == tl.float16 and BLOCK_E >= 32
    cols_R, cols_E, heads_G = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_G)
    ok_R, ok_E, ok_G = cols_R < HALF, cols_E < HEAD_DIM, heads_G < GROUP
    let_next_start(PDL)
    # Lengths and block tables were written before the step's first kernel: they may be read while the previous kernel still runs.
    token = tl.load(start_loc_ptr + seq).to(tl.int64)
    query_len = tl.load(start_loc_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    first = first_visible(seq_len - 1, WINDOW, CHUNKED)
    num_keys = seq_len - first
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_C) * BLOCK_C, MIN_SPLIT)
    used_splits = tl.cdiv(num_keys, per_split)
    if split >= tl.maximum(used_splits, 1):  # without a wait: split 0 of the sequence waits for the previous kernel
        return
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, seq_len - 1 if IS_CAUSAL else seq_len)
    base = kv_ptr + kv_head * PAGE
    value_bits: tl.constexpr = kv_ptr.dtype.element_ty.primitive_bitwidth
    if PDL and HEAD_DIM * value_bits % 128 == 0 and PAGE * value_bits % 128 == 0:
        if (query_len == 1) & (begin < end):
            ahead_C = tl.minimum(begin + tl.arange(0, BLOCK_C), end - 1)
            block_C = tl.load(block_table_ptr + seq * table_stride + ahead_C // BLOCK_SIZE).to(tl.int64)
            rows_C = base + block_C * block_stride + (ahead_C % BLOCK_SIZE) * HEAD_DIM
            prefetch_rows_l2(rows_C, HEAD_DIM)
            prefetch_rows_l2(rows_C + TO_VALUES, HEAD_DIM)
    wait_for_previous(PDL)
    # The prefill kernel runs sequences with more query tokens. Padding (length 0) gets zeros.
    if query_len != 1:
        return
    out_GE = out_ptr + token * (NUM_HEADS * HEAD_DIM) + (kv_head * GROUP + heads_G)[:, None] * HEAD_DIM + cols_E[None, :]
    ok_GE = ok_G[:, None] & ok_E[None, :]
    if seq_len <= 0:
        if split == 0:
            tl.store(out_GE, tl.zeros((BLOCK_G, BLOCK_E), dtype=tl.float32).to(dtype), mask=ok_GE)
        return

    cos_row, sin_row = cos_ptr, sin_ptr
    if HAS_ROPE:
        cos_row, sin_row = cos_ptr + token * cos_stride, sin_ptr + token * cos_stride
    q_low_GR, q_high_GR = load_norm_rope(
        q_ptr + token * q_stride + kv_head * (GROUP * HEAD_DIM),
        ok_G,
        cos_row,
        sin_row,
        q_norm_ptr,
        heads_G * HEAD_DIM,
        eps,
        tl.float32,
        HEAD_DIM,
        BLOCK_R,
        HAS_Q_NORM,
        HAS_ROPE,
    )
    q_low_GR, q_high_GR = to_products(q_low_GR, product), to_products(q_high_GR, product)
    max_G = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    sum_G = tl.zeros((BLOCK_G,), dtype=tl.float32)
    acc_GE = tl.zeros((BLOCK_G, BLOCK_E), dtype=tl.float32)
    slopes_G1 = load_head_log2(slopes_ptr, kv_head * GROUP + heads_G, ok_G, HAS_ALIBI)[:, None]
    if split == (used_splits - 1 if IS_CAUSAL else -1):
        one = tl.zeros((1,), dtype=tl.int32)
        k_low_1R, k_high_1R = load_norm_rope(
            k_ptr + token * k_stride + kv_head * HEAD_DIM,
            one == 0,
            cos_row,
            sin_row,
            k_norm_ptr,
            one,
            eps,
            dtype,
            HEAD_DIM,
            BLOCK_R,
            HAS_K_NORM,
            HAS_ROPE,
        )
        v_E = tl.load(v_ptr + token * v_stride + kv_head * HEAD_DIM + cols_E, mask=ok_E, other=0.0)
        # Converted to the cache's dtype, so that this step uses the same key and value as later steps.
        if is_int8:
            v_1E = v_E[None, :]
            k_scale_1, v_scale_1 = int8_scale(k_low_1R, k_high_1R), int8_scale(v_1E, v_1E)
            k_low_1R, k_high_1R = to_int8(k_low_1R, k_scale_1), to_int8(k_high_1R, k_scale_1)
            v_E = tl.reshape(to_int8(v_1E, v_scale_1), (BLOCK_E,))
        k_low_1R, k_high_1R, v_E = to_cache(k_low_1R, kv_ptr), to_cache(k_high_1R, kv_ptr), to_cache(v_E, kv_ptr)
        slot = tl.load(slot_ptr + token)
        if slot >= 0:
            page = base + (slot // BLOCK_SIZE) * block_stride
            at = page + (slot % BLOCK_SIZE) * HEAD_DIM
            tl.store(at + cols_R[None, :], k_low_1R, mask=ok_R[None, :])
            tl.store(at + HALF + cols_R[None, :], k_high_1R, mask=ok_R[None, :])
            tl.store(at + TO_VALUES + cols_E, v_E, mask=ok_E)
            if is_int8:
                scale_1 = scales_of(page, BLOCK_SIZE, HEAD_DIM) + slot % BLOCK_SIZE + one
                tl.store(scale_1, k_scale_1)
                tl.store(scale_1 + TO_VALUES // 4, v_scale_1)
        dot_G = tl.sum(q_low_GR.to(tl.float32) * k_low_1R.to(tl.float32), 1)
        dot_G += tl.sum(q_high_GR.to(tl.float32) * k_high_1R.to(tl.float32), 1)
        v_E = v_E.to(tl.float32)
        if is_int8:
            dot_G *= k_scale_1
            v_E *= v_scale_1 * UNIT
        max_G = score_log2(dot_G, 0.0, 0.0, scale_log2, cap_log2, HAS_CAP, False)
        sum_G += 1.0
        acc_GE += v_E[None, :]
        if HAS_SINKS:
            sinks_G = load_head_log2(sinks_ptr, kv_head * GROUP + heads_G, ok_G, HAS_SINKS)
            largest_G = tl.maximum(max_G, sinks_G)
            shrink_G = tl.exp2(max_G - largest_G)
            sum_G = shrink_G + tl.exp2(sinks_G - largest_G)
            acc_GE *= shrink_G[:, None]
            max_G = largest_G

    if is_paired:
        pairs_H = tl.arange(0, HALVES)
        even_GH, odd_GH = tl.split(tl.reshape(acc_GE, (BLOCK_G, HALVES, 2)))
    for start in tl.range(begin, end, BLOCK_C, num_stages=STAGES):
        tokens_C = start + tl.arange(0, BLOCK_C)
        ok_C = tokens_C < end
        block_C = tl.load(block_table_ptr + seq * table_stride + tokens_C // BLOCK_SIZE, mask=ok_C, other=0).to(tl.int64)
        rows_C = block_C * block_stride + (tokens_C % BLOCK_SIZE) * HEAD_DIM
        k_CR = base + rows_C[:, None] + cols_R[None, :]
        ok_CR = ok_C[:, None] & ok_R[None, :]
        k_low_CR = from_cache(tl.load(k_CR, mask=ok_CR, other=0.0), product)
        k_high_CR = from_cache(tl.load(k_CR + HALF, mask=ok_CR, other=0.0), product)
        v_rows_C = base + TO_VALUES + rows_C
        if is_paired:
            pairs_CH = tl.load(
                v_rows_C[:, None].to(tl.pointer_type(tl.int16)) + pairs_H[None, :], mask=ok_C[:, None] & (pairs_H < HALF)[None, :], other=0
            )
        else:
            v_CE = tl.load(v_rows_C[:, None] + cols_E[None, :], mask=ok_C[:, None] & ok_E[None, :], other=0.0)
            v_CE = from_cache(v_CE, product)
        scores_GC = tl.dot(q_low_GR, tl.trans(k_low_CR), input_precision="ieee")
        scores_GC = tl.dot(q_high_GR, tl.trans(k_high_CR), scores_GC, input_precision="ieee")
        if is_int8:
            k_scale_C, v_scale_C = load_scales(base + block_C * block_stride, tokens_C % BLOCK_SIZE, ok_C, TO_VALUES, BLOCK_SIZE, HEAD_DIM)
            scores_GC *= k_scale_C[None, :]
        distance_C = (tokens_C - (seq_len - 1)).to(tl.float32)
        scores_GC = score_log2(scores_GC, distance_C[None, :], slopes_G1, scale_log2, cap_log2, HAS_CAP, HAS_ALIBI)
        scores_GC = tl.where(ok_C[None, :], scores_GC, float("-inf"))
        new_max_G = tl.maximum(max_G, tl.max(scores_GC, 1))
        shrink_G = tl.exp2(max_G - new_max_G)
        probs_GC = tl.exp2(scores_GC - new_max_G[:, None])
        sum_G = sum_G * shrink_G + tl.sum(probs_GC, 1)
        if is_int8:
            probs_GC *= v_scale_C[None, :]
        if is_paired:
            v_even_CH, v_odd_CH = unpack_pairs(pairs_CH, is_int8, PDL)
            even_GH = tl.dot(probs_GC.to(product), v_even_CH, even_GH * shrink_G[:, None])
            odd_GH = tl.dot(probs_GC.to(product), v_odd_CH, odd_GH * shrink_G[:, None])
        else:
            acc_GE = tl.dot(probs_GC.to(product), v_CE, acc_GE * shrink_G[:, None], input_precision="ieee")
        max_G = new_max_G
    if is_paired:
        acc_GE = tl.interleave(even_GH, odd_GH)

    if is_int8:
        acc_GE /= UNIT
    if used_splits == 1:
        tl.store(out_GE, (acc_GE / sum_G[:, None]).to(dtype), mask=ok_GE)
        return
    if SPLITS > 1:
        # Partial results: [S, splits, H, E] sums, then [S, splits, H] maxima, then as many sums of exponentials.
        rows = num_seqs * SPLITS * NUM_HEADS
        row_G = (seq * SPLITS + split) * NUM_HEADS + kv_head * GROUP + heads_G
        tl.store(partial_ptr + row_G.to(tl.int64)[:, None] * HEAD_DIM + cols_E[None, :], acc_GE, mask=ok_GE)
        max_ptr = partial_ptr + rows.to(tl.int64) * HEAD_DIM
        tl.store(max_ptr + row_G, max_G, mask=ok_G)
        tl.store(max_ptr + rows + row_G, sum_G, mask=ok_G)
        tl.debug_barrier()
        counter = counter_ptr + seq * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used_splits - 1:
            all_max_G = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
            all_sum_G = tl.zeros((BLOCK_G,), dtype=tl.float32)
            all_acc_GE = tl.zeros((BLOCK_G, BLOCK_E), dtype=tl.float32)
            for first_split in range(0, used_splits, UNROLL):
                for nth in tl.static_range(UNROLL):  # loads of several splits are in flight at once
                    other = first_split + nth
                    row_G = (seq * SPLITS + other) * NUM_HEADS + kv_head * GROUP + heads_G
                    there_G = heads_G < tl.where(other < used_splits, GROUP, 0)
                    other_max_G = tl.load(max_ptr + row_G, mask=there_G, other=float("-inf"), cache_modifier=".cg")
                    other_sum_G = tl.load(max_ptr + rows + row_G, mask=there_G, other=0.0, cache_modifier=".cg")
                    other_acc_GE = tl.load(
                        partial_ptr + row_G.to(tl.int64)[:, None] * HEAD_DIM + cols_E[None, :],
                        mask=there_G[:, None] & ok_E[None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_max_G = tl.maximum(all_max_G, other_max_G)
                    shrink_G, weight_G = tl.exp2(all_max_G - new_max_G), tl.exp2(other_max_G - new_max_G)
                    all_sum_G = all_sum_G * shrink_G + other_sum_G * weight_G
                    all_acc_GE = all_acc_GE * shrink_G[:, None] + other_acc_GE * weight_G[:, None]
                    all_max_G = new_max_G
            tl.store(out_GE, (all_acc_GE / all_sum_G[:, None]).to(dtype), mask=ok_GE)
            tl.store(counter, 0)


def decode_config(num_seqs: int, num_kv_heads: int, sms: int, itemsize: int = 2, head_dim: int = 128) -> tuple[int, int, int, int, int]:
    """(tile of keys, splits, stages, warps, min. tokens per split) for a number of sequences. itemsize: bytes of a cached value.

    Few sequences get many splits, because contexts may be long. On an H200 with Llama-3.1-8B's heads and a float8 cache, 16 sequences of
    24000 tokens take 262 µs instead of 363 µs with two splits; 16 of 640 tokens take 21 µs instead of 17 µs
    (`h200-decode-attention-2026-11-22.jsonl`). Many sequences fill the device, and the longest run first, so only sequences of more than
    2048 tokens are split: one of them would otherwise run alone at the end. One warp per program is the fastest if there are enough
    programs to keep the loads in flight: for 256 sequences of 200 tokens and 4 heads it takes 37 µs, and four warps take 41 µs
    (`h200-decode-choices-2026-11-24.jsonl`).
    Heads of more than 128 values get tiles of half as many keys, or two warps, so that a tile fits the registers.
    """
    tile, splits, stages, warps, min_split = _decode_config(num_seqs, num_kv_heads, sms, itemsize)
    if head_dim > 128:
        tile, warps = max(32, tile // 2), max(2, warps)
    return tile, splits, stages, warps, min_split


def _decode_config(num_seqs: int, num_kv_heads: int, sms: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """`decode_config` for head sizes up to 128."""
    groups, is_float8 = num_seqs * num_kv_heads, itemsize == 1
    if groups <= sms // 8:
        return 128, MAX_SPLITS, 2, 4, 128
    if groups < sms:
        return 64, MAX_SPLITS, 2, 2, 384 if is_float8 else 256
    splits = 4 if groups <= SPLIT_COUNTERS else 1
    if groups < (8 if is_float8 else 6) * sms:
        return (64, MAX_SPLITS, 2, 2, 2048) if is_float8 else (64, splits, 2, 4, 2048)
    return (64, splits, 2, 1, 4096) if is_float8 else (32, splits, 2, 1, 2048)


def decode_attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    cos_TE: torch.Tensor | None,
    sin_TE: torch.Tensor | None,
    kv_cache: torch.Tensor,
    scale: float,
    query_start_loc: torch.Tensor,
    seq_lens_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    out_THE: torch.Tensor,
    num_seqs: int,
    q_norm_weight_E: torch.Tensor | None = None,
    k_norm_weight_E: torch.Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    chunked: bool = False,
    scores: Scores = PLAIN_SCORES,
    config: tuple[int, int, int, int, int] | None = None,
    is_causal: bool = True,
) -> None:
    """out = attention of the sequences with exactly one query token. Rows of other sequences are not written.

    q_THE, k_TKE, v_TKE: the step's heads before norm and rope, rows may be strided. cos_TE, sin_TE: [T, E]; None: no rope.
    kv_cache: [N, 2, K, P, E], q's dtype, float8_e4m3fn or int8; the new tokens are written. A sequence of length 0 is padding: it gets
    zeros. config: replaces `decode_config`'s. is_causal: of the metadata. If it is False, the keys and values are written already,
    and no sinks are given.
    The metadata's tensors are as in `AttentionMetadata`; num_seqs: S of the launch.
    """
    q_THE, k_TKE, v_TKE = heads_contiguous(q_THE), heads_contiguous(k_TKE), heads_contiguous(v_TKE)
    num_heads, head_dim = q_THE.shape[1:]
    num_kv_heads, block_size = k_TKE.shape[1], kv_cache.shape[3]
    device = q_THE.device
    assert is_causal or scores.sinks_H is None
    block_c, splits, stages, warps, min_split = config or decode_config(
        num_seqs, num_kv_heads, num_sms(device), kv_cache.itemsize, head_dim
    )
    min_split = max(block_c, min_split)
    if window is not None:
        splits = min(splits, cdiv(window, min_split))  # no more of them have keys
    # The linears of a step of one sequence need the L1 cache; those of more sequences keep their loads in shared memory.
    resident = cdiv(num_kv_heads * splits, num_sms(device)) if num_seqs == 1 else None
    partial = counters = None
    if splits > 1:
        partial = torch.empty(num_seqs * splits * num_heads * (head_dim + 2), dtype=torch.float32, device=device)
        counters = split_counters(device)
    pdl = supports_pdl(device)
    launch(
        _decode_kernel, (num_kv_heads, num_seqs, splits),
        q_THE, k_TKE, v_TKE, cos_TE, sin_TE, q_norm_weight_E, k_norm_weight_E, kv_cache, out_THE, partial, counters,
        query_start_loc, seq_lens_S, block_table_SM, slot_mapping_T, scores.sinks_H, scores.alibi_slopes_H,
        q_THE.stride(0), k_TKE.stride(0), v_TKE.stride(0), cos_TE.stride(0) if cos_TE is not None else 0,
        kv_cache.stride(0), block_table_SM.stride(0), num_seqs, scale * LOG2_E,
        scores.soft_cap * LOG2_E, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_G=max(16, next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_R=max(16, next_power_of_2(head_dim // 2)), BLOCK_E=max(16, next_power_of_2(head_dim)), BLOCK_C=block_c,
        SPLITS=splits, MIN_SPLIT=min_split, STAGES=stages,
        WINDOW=window or 0, CHUNKED=chunked, HAS_CAP=scores.soft_cap > 0, HAS_SINKS=scores.sinks_H is not None,
        HAS_ALIBI=scores.alibi_slopes_H is not None,
        HAS_Q_NORM=q_norm_weight_E is not None, HAS_K_NORM=k_norm_weight_E is not None, HAS_ROPE=cos_TE is not None,
        IS_CAUSAL=is_causal, PDL=pdl, RESIDENT=resident, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip

"""Materialized latent attention of prompts: entries are gathered from the cache, expanded to keys and values, and attended to.

Shape legend: T tokens, S sequences, H heads, N and R sizes of a query and key without and with RoPE, V size of a value, C size of the
latent, P tokens per page, M block-table columns, Q query tokens per tile, K keys per tile, L keys in memory at a time.

The keys of all sequences are numbered one sequence after another, and expanded in parts of at most `part_size` keys, which bounds the
memory. If there are several parts, the running softmax of every query is kept in float32 between them. That takes as much memory as the
keys of one more step, so a part has up to twice the keys of the step: a prompt that goes on behind a short cached prefix has one part.
FlashAttention-3 takes all keys at once, and reads those of a head in one piece: their parts without and with RoPE are joined for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.flash_attention3 import FlashAttention3Prompts
from compile_and_serve.custom_ops.attention.triton_scores import LOG2_E
from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead, launch
from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2

PART_BYTES = 64 << 20  # of expanded keys and values, where twice a step's own take less


@triton.jit(do_not_specialize=["first_seq", "part_begin", "part_end"])
def _gather_kernel(
    cache_ptr,
    out_ptr,
    key_starts_ptr,
    seq_lens_ptr,
    block_table_ptr,
    page_stride,
    table_stride,
    first_seq,
    part_begin,
    part_end,
    ENTRY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    seq = tl.program_id(1)
    tokens_K = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    keys_K = tl.load(key_starts_ptr + seq) + tokens_K
    ok_K = (tokens_K < tl.load(seq_lens_ptr + first_seq + seq)) & (keys_K >= part_begin) & (keys_K < part_end)
    page_K = tl.load(block_table_ptr + (first_seq + seq) * table_stride + tokens_K // PAGE_SIZE, mask=ok_K, other=0).to(tl.int64)
    cols_E = tl.arange(0, BLOCK_E)
    ok_KE = ok_K[:, None] & (cols_E < ENTRY)[None, :]
    at_KE = cache_ptr + (page_K * page_stride + (tokens_K % PAGE_SIZE) * ENTRY)[:, None] + cols_E[None, :]
    values_KE = tl.load(at_KE, mask=ok_KE, other=0.0)
    out_KE = out_ptr + (keys_K - part_begin).to(tl.int64)[:, None] * ENTRY + cols_E[None, :]
    tl.store(out_KE, values_KE.to(out_ptr.dtype.element_ty), mask=ok_KE)


@triton.jit
def _join_kernel(
    left_ptr,
    right_ptr,
    out_ptr,
    left_row_stride,
    left_head_stride,
    right_row_stride,
    right_head_stride,
    NUM_HEADS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The heads of a row: out = (left, right)."""
    row = tl.program_id(0).to(tl.int64)
    heads_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    cols_L, cols_R = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    ok_H1 = (heads_H < NUM_HEADS)[:, None]
    ok_HL, ok_HR = ok_H1 & (cols_L < LEFT)[None, :], ok_H1 & (cols_R < RIGHT)[None, :]
    left_at = left_ptr + row * left_row_stride + heads_H[:, None] * left_head_stride
    right_at = right_ptr + row * right_row_stride + heads_H[:, None] * right_head_stride
    out_at = out_ptr + (row * NUM_HEADS + heads_H)[:, None] * (LEFT + RIGHT)
    left_HL = tl.load(left_at + cols_L[None, :], mask=ok_HL, other=0.0)
    right_HR = tl.load(right_at + cols_R[None, :], mask=ok_HR, other=0.0)
    tl.store(out_at + cols_L[None, :], left_HL, mask=ok_HL)
    tl.store(out_at + LEFT + cols_R[None, :], right_HR, mask=ok_HR)


@triton.jit
def _attend_tile(
    start,
    stop,
    q_QN,
    q_QR,
    max_Q,
    sum_Q,
    acc_QV,
    positions_Q,
    k_base,
    rope_base,
    kv_stride,
    rope_stride,
    cols_N,
    cols_R,
    cols_V,
    scale_log2,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over keys start … start + K - 1 before `stop`.

    MASKED: some rows come before some keys, or `stop` is in the tile.
    """
    tokens_K = start + tl.arange(0, BLOCK_K)
    k_at = k_base + tokens_K[:, None] * kv_stride
    rope_at = rope_base + tokens_K[:, None] * rope_stride
    ok_N, ok_R, ok_V = (cols_N < NOPE)[None, :], (cols_R < ROPE)[None, :], (cols_V < VALUE)[None, :]
    if MASKED:
        ok_K1 = (tokens_K < stop)[:, None]
        ok_N, ok_R, ok_V = ok_K1 & ok_N, ok_K1 & ok_R, ok_K1 & ok_V
    k_KN = tl.load(k_at + cols_N[None, :], mask=ok_N, other=0.0)
    k_KR = tl.load(rope_at + cols_R[None, :], mask=ok_R, other=0.0)
    v_KV = tl.load(k_at + NOPE + cols_V[None, :], mask=ok_V, other=0.0)
    scores_QK = tl.dot(q_QN, tl.trans(k_KN), input_precision="ieee")
    scores_QK = tl.dot(q_QR, tl.trans(k_KR), scores_QK, input_precision="ieee")
    if MASKED:
        seen_QK = (tokens_K[None, :] <= positions_Q[:, None]) & (tokens_K < stop)[None, :]
        scores_QK = tl.where(seen_QK, scores_QK, float("-inf"))
    # A row may attend to no key of the tile. A finite maximum keeps it from becoming NaN.
    new_max_Q = tl.maximum(tl.maximum(max_Q, tl.max(scores_QK, 1) * scale_log2), -1e30)
    probs_QK = tl.exp2(scores_QK * scale_log2 - new_max_Q[:, None])
    shrink_Q = tl.exp2(max_Q - new_max_Q)
    sum_Q = sum_Q * shrink_Q + tl.sum(probs_QK, 1)
    acc_QV = tl.dot(probs_QK.to(v_KV.dtype), v_KV, acc_QV * shrink_Q[:, None], input_precision="ieee")
    return new_max_Q, sum_Q, acc_QV


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_queries", "num_keys", "part_begin", "part_end"])
def _mla_prefill_kernel(
    q_ptr, q_rope_ptr, kv_ptr, entries_ptr, out_ptr, sums_ptr, softmax_ptr, start_loc_ptr, seq_lens_ptr, key_starts_ptr,
    q_stride, first_seq, num_seqs, num_queries, num_keys, part_begin, part_end, scale_log2,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, HAS_PARTS: tl.constexpr,
):  # fmt: skip
    # The last tiles of a sequence attend to the most keys: they start first.
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    start_loc_ptr += first_seq
    base_token = tl.load(start_loc_ptr)
    # Sequence s starts at tile (start_loc[s] - start_loc[0]) // Q + s or before. Find the last s whose first tile is not after this one.
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(start_loc_ptr + middle) - base_token) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    seq = low
    first = tl.load(start_loc_ptr + seq)
    query_len = tl.load(start_loc_ptr + seq + 1) - first
    begin = (tile - ((first - base_token) // BLOCK_Q + seq)) * BLOCK_Q
    if begin >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + first_seq + seq)
    offset = seq_len - query_len
    key_start = tl.load(key_starts_ptr + seq)
    rows_Q = begin + tl.arange(0, BLOCK_Q)
    ok_Q = rows_Q < query_len
    positions_Q = offset + rows_Q
    cols_N, cols_R, cols_V = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    tokens_Q = (first + rows_Q).to(tl.int64)
    q_QN = tl.load(
        q_ptr + tokens_Q[:, None] * q_stride + head * (NOPE + ROPE) + cols_N[None, :],
        mask=ok_Q[:, None] & (cols_N < NOPE)[None, :],
        other=0.0,
    )
    q_QR = tl.load(
        q_rope_ptr + (tokens_Q * NUM_HEADS + head)[:, None] * ROPE + cols_R[None, :],
        mask=ok_Q[:, None] & (cols_R < ROPE)[None, :],
        other=0.0,
    )
    ok_QV = ok_Q[:, None] & (cols_V < VALUE)[None, :]
    state_Q = (tokens_Q - base_token) * NUM_HEADS + head  # this row between the parts
    state_rows = num_queries.to(tl.int64) * NUM_HEADS
    max_Q = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    sum_Q = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    acc_QV = tl.zeros((BLOCK_Q, BLOCK_V), dtype=tl.float32)
    if HAS_PARTS:
        was_kept_Q = rows_Q < tl.where(part_begin > 0, query_len, 0)
        max_Q = tl.load(softmax_ptr + state_Q, mask=was_kept_Q, other=float("-inf"))
        sum_Q = tl.load(softmax_ptr + state_rows + state_Q, mask=was_kept_Q, other=0.0)
        ok_kept_QV = was_kept_Q[:, None] & (cols_V < VALUE)[None, :]
        acc_QV = tl.load(sums_ptr + state_Q[:, None] * VALUE + cols_V[None, :], mask=ok_kept_QV, other=0.0)
    # Every row of the tile attends to the keys from `lower` to `whole`: they need no mask.
    lower = tl.maximum(part_begin - key_start, 0)
    end = tl.minimum(tl.minimum(part_end - key_start, seq_len), offset + begin + BLOCK_Q)
    whole = lower + tl.maximum(tl.minimum(offset + begin + 1, end) - lower, 0) // BLOCK_K * BLOCK_K
    KV_STRIDE: tl.constexpr = NUM_HEADS * (NOPE + VALUE)
    row_base = (key_start - part_begin).to(tl.int64)
    k_base = kv_ptr + row_base * KV_STRIDE + head * (NOPE + VALUE)
    rope_base = entries_ptr + row_base * (LATENT + ROPE) + LATENT
    for start in tl.range(lower, whole, BLOCK_K, num_stages=STAGES):
        max_Q, sum_Q, acc_QV = _attend_tile(
            start,
            end,
            q_QN,
            q_QR,
            max_Q,
            sum_Q,
            acc_QV,
            positions_Q,
            k_base,
            rope_base,
            KV_STRIDE,
            LATENT + ROPE,
            cols_N,
            cols_R,
            cols_V,
            scale_log2,
            NOPE,
            ROPE,
            VALUE,
            BLOCK_K,
            False,
        )
    for start in tl.range(whole, end, BLOCK_K, num_stages=1):
        max_Q, sum_Q, acc_QV = _attend_tile(
            start,
            end,
            q_QN,
            q_QR,
            max_Q,
            sum_Q,
            acc_QV,
            positions_Q,
            k_base,
            rope_base,
            KV_STRIDE,
            LATENT + ROPE,
            cols_N,
            cols_R,
            cols_V,
            scale_log2,
            NOPE,
            ROPE,
            VALUE,
            BLOCK_K,
            True,
        )
    if HAS_PARTS:
        keep_Q = rows_Q < tl.where(part_end < num_keys, query_len, 0)
        tl.store(softmax_ptr + state_Q, max_Q, mask=keep_Q)
        tl.store(softmax_ptr + state_rows + state_Q, sum_Q, mask=keep_Q)
        tl.store(sums_ptr + state_Q[:, None] * VALUE + cols_V[None, :], acc_QV, mask=ok_QV & keep_Q[:, None])
        ok_QV &= ~keep_Q[:, None]
    out_QV = out_ptr + (tokens_Q * NUM_HEADS + head)[:, None] * VALUE + cols_V[None, :]
    tl.store(out_QV, (acc_QV / sum_Q[:, None]).to(dtype), mask=ok_QV)


def _expand(
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    seq_lens_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    key_starts: torch.Tensor,
    dtype: torch.dtype,
    *,
    first_seq: int,
    part: tuple[int, int],
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries [L, C + R] of the keys from part[0] to part[1], and what kv_b makes of them [L, H · (N + V)]."""
    begin, end = part
    entry = cache.shape[2]
    entries_LE = torch.empty(end - begin, entry, dtype=dtype, device=cache.device)
    launch(
        _gather_kernel,
        (cdiv(max_seq_len, 32), len(key_starts) - 1),
        cache,
        entries_LE,
        key_starts,
        seq_lens_S,
        block_table_SM,
        cache.stride(0),
        block_table_SM.stride(0),
        first_seq,
        begin,
        end,
        ENTRY=entry,
        PAGE_SIZE=cache.shape[1],
        BLOCK_K=32,
        BLOCK_E=next_power_of_2(entry),
        num_warps=4,
    )
    return entries_LE, F.linear(entries_LE[:, : kv_b.shape[1]], kv_b)


def expanded_bytes_per_key(num_heads: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """What `flash_materialized_attention` keeps of a key while it runs. sizes: N, R, V, C."""
    nope_size, rope_size, values, latent_size = sizes
    return (latent_size + rope_size + num_heads * (2 * nope_size + rope_size + values)) * dtype.itemsize


def flash_materialized_attention(
    q_THE: torch.Tensor,
    q_rope_THR: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    prompts: FlashAttention3Prompts,
    seq_lens_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    key_starts: torch.Tensor,
    out_THV: torch.Tensor,
    *,
    first_seq: int,
    num_keys: int,
    max_seq_len: int,
) -> None:
    """As `materialized_attention`, in FlashAttention-3. q_THE, q_rope_THR, out_THV: of the planned prompts alone."""
    num_heads, rope_size = q_rope_THR.shape[1:]
    latent_size = kv_b.shape[1]
    entries_LE, kv_LE = _expand(
        kv_b, cache, seq_lens_S, block_table_SM, key_starts, q_THE.dtype, first_seq=first_seq, part=(0, num_keys), max_seq_len=max_seq_len
    )
    kv_LHE = kv_LE.view(num_keys, num_heads, -1)
    nope_size = q_THE.shape[2] - rope_size
    keys_LHE = _join(kv_LHE[:, :, :nope_size], entries_LE[:, None, latent_size:].expand(-1, num_heads, -1))
    prompts.run(_join(q_THE[:, :, :nope_size], q_rope_THR), keys_LHE, kv_LHE[:, :, nope_size:], out_THV)


def _join(left_LHN: torch.Tensor, right_LHR: torch.Tensor) -> torch.Tensor:
    """torch.cat along the last dimension, for inputs with any strides of the others."""
    rows, num_heads, left = left_LHN.shape
    right = right_LHR.shape[2]
    out_LHE = left_LHN.new_empty(rows, num_heads, left + right)
    block_h = min(16, next_power_of_2(num_heads))
    launch(
        _join_kernel,
        (rows, cdiv(num_heads, block_h)),
        left_LHN,
        right_LHR,
        out_LHE,
        *left_LHN.stride()[:2],
        *right_LHR.stride()[:2],
        NUM_HEADS=num_heads,
        LEFT=left,
        RIGHT=right,
        BLOCK_H=block_h,
        BLOCK_L=next_power_of_2(left),
        BLOCK_R=next_power_of_2(right),
        num_warps=4,
    )
    return out_LHE


def materialized_attention(
    q_THE: torch.Tensor,
    q_rope_THR: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    query_start_loc: torch.Tensor,
    seq_lens_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    key_starts: torch.Tensor,
    out_THV: torch.Tensor,
    *,
    first_seq: int,
    num_queries: int,
    num_keys: int,
    max_seq_len: int,
    part_size: int | None = None,
    config: tuple[int, int, int, int] | None = None,
) -> None:
    """out = attention of the sequences from first_seq on, of which there are len(key_starts) - 1.

    q_THE: [T, H, N + R], its rotated part is in q_rope_THR (contiguous); out_THV: contiguous. cache: [pages, P, C + R], which holds the
    step's own entries. key_starts: int32 [their number + 1], sums of their lengths. num_queries, num_keys: of these sequences.
    part_size: keys that are expanded at a time; None: as many as PART_BYTES hold, and at least 2 · num_queries. config: (query tile, key
    tile, stages, warps).
    """
    num_heads, values = out_THV.shape[1:]
    rope_size, nope_size = q_rope_THR.shape[2], q_THE.shape[2] - q_rope_THR.shape[2]
    latent_size, num_seqs, device = kv_b.shape[1], len(key_starts) - 1, q_THE.device
    block_q, block_k, stages, warps = config or ((128, 64, 3, 8) if q_THE.itemsize == 2 else (32, 32, 1, 4))
    if part_size is None:
        part_size = max(2 * num_queries, PART_BYTES // (kv_b.shape[0] * kv_b.itemsize))
        if is_compiling_ahead():  # a step with a long prefix has the same kernels with several parts
            materialized_attention(
                q_THE,
                q_rope_THR,
                kv_b,
                cache,
                scale,
                query_start_loc,
                seq_lens_S,
                block_table_SM,
                key_starts,
                out_THV,
                first_seq=first_seq,
                num_queries=num_queries,
                num_keys=num_keys,
                max_seq_len=max_seq_len,
                part_size=cdiv(num_keys, 2),
            )
    parts = range(0, num_keys, part_size)
    has_parts = len(parts) > 1
    sums = softmax = None
    if has_parts:
        sums = torch.empty(num_queries * num_heads * values, dtype=torch.float32, device=device)
        softmax = torch.empty(2 * num_queries * num_heads, dtype=torch.float32, device=device)
    for begin in parts:
        end = min(begin + part_size, num_keys)
        entries_LE, kv_LE = _expand(
            kv_b,
            cache,
            seq_lens_S,
            block_table_SM,
            key_starts,
            q_THE.dtype,
            first_seq=first_seq,
            part=(begin, end),
            max_seq_len=max_seq_len,
        )
        launch(
            _mla_prefill_kernel, (num_heads, num_queries // block_q + num_seqs),
            q_THE, q_rope_THR, kv_LE, entries_LE, out_THV, sums, softmax, query_start_loc, seq_lens_S, key_starts,
            q_THE.stride(0), first_seq, num_seqs, num_queries, num_keys, begin, end, scale * LOG2_E,
            NUM_HEADS=num_heads, NOPE=nope_size, ROPE=rope_size, VALUE=values, LATENT=latent_size, BLOCK_Q=block_q, BLOCK_K=block_k,
            BLOCK_N=max(16, next_power_of_2(nope_size)), BLOCK_R=max(16, next_power_of_2(rope_size)),
            BLOCK_V=max(16, next_power_of_2(values)), STAGES=stages, HAS_PARTS=has_parts, num_warps=warps,
        )  # fmt: skip

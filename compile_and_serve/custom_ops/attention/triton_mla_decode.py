"""Absorbed latent attention of sequences with few query tokens in Triton, and the kernel that writes entries to the latent cache.

Shape legend: T tokens, S sequences, H heads, N and R sizes of a query without and with RoPE, C size of the latent, P tokens per page,
M block-table columns, G rows of a program, K cached tokens per tile.

A row is one head of one query token. A program computes G rows of a sequence over one split of its cached tokens, and reads every entry
once for all of them. If a sequence has several splits, the last program to finish combines them. The grid depends on the number of
sequences and on the most query tokens of a sequence, not on lengths, so that a captured launch serves every length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.triton_scores import LOG2_E
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    split_counters,
    supports_pdl,
    to_cache,
    to_products,
    wait_for_previous,
)

MAX_SPLITS = 16
MAX_PARTIAL_ROWS = 1 << 15  # of all sequences and splits; a row of partial results is 2 KiB
# Up to MAX_TOKENS tokens, our kernel multiplies by the heads' weights: it loads its weights while the kernel before it still runs.
MAX_TOKENS, MAX_INPUTS, WEIGHT_TILE = 64, 512, 8192


@triton.jit
def _write_kernel(
    q_ptr,
    kv_a_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slot_ptr,
    q_out_ptr,
    q_stride,
    kv_a_stride,
    cos_stride,
    page_stride,
    q_out_token_stride,
    q_out_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_L: tl.constexpr,
    LETS_NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) writes token t's cache entry; the others rotate BLOCK_H heads of its query."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = ROPE // 2
    let_next_start(LETS_NEXT)
    cols = tl.arange(0, BLOCK_HALF)
    ok = cols < HALF
    first_at, second_at = cols, cols + HALF
    if INTERLEAVED:
        first_at, second_at = 2 * cols, 2 * cols + 1
    wait_for_previous(PDL)
    cos = tl.load(cos_ptr + token * cos_stride + cols, mask=ok, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * cos_stride + cols, mask=ok, other=0.0).to(tl.float32)
    if part == 0:
        slot = tl.load(slot_ptr + token)
        if slot < 0:
            return
        dtype: tl.constexpr = kv_a_ptr.dtype.element_ty
        cols_L = tl.arange(0, BLOCK_L)
        ok_L = cols_L < LATENT
        row = kv_a_ptr + token * kv_a_stride
        x_L = tl.load(row + cols_L, mask=ok_L, other=0.0).to(tl.float32)
        weight_L = tl.load(norm_ptr + cols_L, mask=ok_L, other=0.0).to(tl.float32)
        latent_L = (x_L * tl.rsqrt(tl.sum(x_L * x_L, 0) / LATENT + eps) * weight_L).to(dtype)
        first = tl.load(row + LATENT + first_at, mask=ok, other=0.0).to(tl.float32)
        second = tl.load(row + LATENT + second_at, mask=ok, other=0.0).to(tl.float32)
        at = cache_ptr + (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * (LATENT + ROPE)
        tl.store(at + cols_L, to_cache(latent_L, cache_ptr), mask=ok_L)
        tl.store(at + LATENT + cols, to_cache((first * cos - second * sin).to(dtype), cache_ptr), mask=ok)
        tl.store(at + LATENT + HALF + cols, to_cache((second * cos + first * sin).to(dtype), cache_ptr), mask=ok)
    else:
        heads_H = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        ok_H = (heads_H < NUM_HEADS)[:, None] & ok[None, :]
        row_H = q_ptr + token * q_stride + heads_H[:, None] * (NOPE + ROPE) + NOPE
        first_H = tl.load(row_H + first_at[None, :], mask=ok_H, other=0.0).to(tl.float32)
        second_H = tl.load(row_H + second_at[None, :], mask=ok_H, other=0.0).to(tl.float32)
        out_H = q_out_ptr + token * q_out_token_stride + heads_H[:, None] * q_out_head_stride + cols[None, :]
        out_dtype: tl.constexpr = q_out_ptr.dtype.element_ty
        tl.store(out_H, (first_H * cos[None, :] - second_H * sin[None, :]).to(out_dtype), mask=ok_H)
        tl.store(out_H + HALF, (second_H * cos[None, :] + first_H * sin[None, :]).to(out_dtype), mask=ok_H)


def write_latents(
    q_THE: torch.Tensor,
    kv_a_TE: torch.Tensor,
    norm_weight_C: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    eps: float,
    interleaved: bool,
    out_THR: torch.Tensor | None = None,
    lets_next_start: bool = True,
) -> torch.Tensor:
    """Write (norm(latent), rope(key)) to the cache at slot_mapping, and return the rotated parts of the queries. → [T, H, R]

    Arguments as in `mla_attention`; the heads of a query are contiguous. slot_mapping_T: int64 [T], -1 is skipped. out_THR: where the
    result goes; its last dimension is contiguous. lets_next_start: False: the next kernel starts when this one has ended.
    """
    num_tokens, num_heads, head_size = q_THE.shape
    rope_size, latent_size = cos_TR.shape[1], norm_weight_C.shape[0]
    q_rope_THR = q_THE.new_empty(num_tokens, num_heads, rope_size) if out_THR is None else out_THR
    if num_tokens == 0:
        return q_rope_THR
    block_h = min(16, next_power_of_2(num_heads))
    pdl = supports_pdl(q_THE.device)
    launch(
        _write_kernel, (num_tokens, 1 + cdiv(num_heads, block_h)),
        q_THE, kv_a_TE, norm_weight_C, cos_TR, sin_TR, cache, slot_mapping_T, q_rope_THR,
        q_THE.stride(0), kv_a_TE.stride(0), cos_TR.stride(0), cache.stride(0), *q_rope_THR.stride()[:2], eps,
        NUM_HEADS=num_heads, NOPE=head_size - rope_size, ROPE=rope_size, LATENT=latent_size, PAGE_SIZE=cache.shape[1],
        INTERLEAVED=interleaved, BLOCK_H=block_h, BLOCK_HALF=next_power_of_2(rope_size // 2), BLOCK_L=next_power_of_2(latent_size),
        LETS_NEXT=pdl and lets_next_start, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return q_rope_THR


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    x_head_stride,
    x_token_stride,
    w_head_stride,
    w_input_stride,
    w_output_stride,
    out_head_stride,
    out_token_stride,
    num_tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_T tokens of a head times BLOCK_O columns of its weight."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    let_next_start(PDL)
    rows_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols_I, cols_O = tl.arange(0, BLOCK_I), block * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_I, ok_O, ok_T = cols_I < INPUTS, cols_O < OUTPUTS, rows_T < num_tokens
    w_IO = tl.load(
        w_ptr + head * w_head_stride + cols_I[:, None] * w_input_stride + cols_O[None, :] * w_output_stride,
        mask=ok_I[:, None] & ok_O[None, :],
        other=0.0,
    )
    wait_for_previous(PDL)
    at_T = rows_T.to(tl.int64)[:, None]
    x_TI = tl.load(x_ptr + head * x_head_stride + at_T * x_token_stride + cols_I[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0)
    y_TO = tl.dot(x_TI, w_IO, input_precision="ieee").to(out_ptr.dtype.element_ty)
    out_TO = out_ptr + head * out_head_stride + at_T * out_token_stride + cols_O[None, :]
    tl.store(out_TO, y_TO, mask=ok_T[:, None] & ok_O[None, :])


def multiply_heads(x_HTI: torch.Tensor, w_HIO: torch.Tensor, out_HTO: torch.Tensor, *, starts_early: bool = True) -> None:
    """out = x w for each head. The last dimensions of x and out are contiguous. starts_early: while the kernel before it still runs."""
    num_heads, num_tokens, inputs = x_HTI.shape
    outputs = w_HIO.shape[2]
    if num_tokens > MAX_TOKENS or inputs > MAX_INPUTS:
        torch.bmm(x_HTI, w_HIO, out=out_HTO)
        return
    block_t = max(16, next_power_of_2(num_tokens))
    block_i = max(16, next_power_of_2(inputs))
    block_o = max(16, WEIGHT_TILE // block_i)
    pdl = supports_pdl(x_HTI.device)
    launch(
        _multiply_kernel,
        (num_heads, cdiv(outputs, block_o), cdiv(num_tokens, block_t)),
        x_HTI,
        w_HIO,
        out_HTO,
        *x_HTI.stride()[:2],
        *w_HIO.stride(),
        *out_HTO.stride()[:2],
        num_tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_T=block_t,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl and starts_early),
    )


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def _mla_decode_kernel(
    q_latent_ptr, q_rope_ptr, cache_ptr, out_ptr, partial_ptr, counter_ptr, start_loc_ptr, seq_lens_ptr, block_table_ptr,
    q_head_stride, out_head_stride, page_stride, table_stride, first_seq, num_seqs, scale_log2,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, MAX_QUERY: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = q_latent_ptr.dtype.element_ty
    is_float8: tl.constexpr = cache_ptr.dtype.element_ty == tl.float8e4nv
    product: tl.constexpr = tl.float16 if is_float8 and dtype == tl.bfloat16 else dtype
    ENTRY: tl.constexpr = LATENT + ROPE
    let_next_start(PDL)
    # Lengths and block tables were written before the step's first kernel: they may be read while the previous kernel still runs.
    first_token = tl.load(start_loc_ptr + first_seq + seq).to(tl.int64)
    query_len = tl.load(start_loc_ptr + first_seq + seq + 1) - first_token.to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + first_seq + seq)
    wait_for_previous(PDL)
    rows_G = group * BLOCK_G + tl.arange(0, BLOCK_G)
    queries_G, heads_G = rows_G // NUM_HEADS, rows_G % NUM_HEADS
    ok_G = queries_G < query_len
    if (group * BLOCK_G >= query_len * NUM_HEADS) | (query_len > MAX_QUERY):
        return
    cols_L, cols_R = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    ok_L, ok_R = cols_L < LATENT, cols_R < ROPE
    tokens_G = first_token + queries_G
    ok_GL = ok_G[:, None] & ok_L[None, :]
    out_GL = out_ptr + heads_G[:, None] * out_head_stride + tokens_G[:, None] * LATENT + cols_L[None, :]
    if seq_len <= 0:  # padding gets zeros
        if split == 0:
            tl.store(out_GL, tl.zeros((BLOCK_G, BLOCK_L), dtype=tl.float32).to(dtype), mask=ok_GL)
        return
    offset = seq_len - query_len
    num_keys = tl.minimum(seq_len, offset + (group * BLOCK_G + BLOCK_G - 1) // NUM_HEADS + 1)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_K) * BLOCK_K, MIN_SPLIT)
    used_splits = tl.cdiv(num_keys, per_split)
    if split >= used_splits:
        return
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_keys)
    positions_G = offset + queries_G
    q_GL = tl.load(q_latent_ptr + heads_G[:, None] * q_head_stride + tokens_G[:, None] * LATENT + cols_L[None, :], mask=ok_GL, other=0.0)
    q_GR = tl.load(
        q_rope_ptr + (tokens_G * NUM_HEADS + heads_G)[:, None] * ROPE + cols_R[None, :], mask=ok_G[:, None] & ok_R[None, :], other=0.0
    )
    q_GL, q_GR = to_products(q_GL, product), to_products(q_GR, product)
    max_G = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    sum_G = tl.zeros((BLOCK_G,), dtype=tl.float32)
    acc_GL = tl.zeros((BLOCK_G, BLOCK_L), dtype=tl.float32)
    table = block_table_ptr + (first_seq + seq) * table_stride
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        tokens_K = start + tl.arange(0, BLOCK_K)
        ok_K = tokens_K < end
        page_K = tl.load(table + tokens_K // PAGE_SIZE, mask=ok_K, other=0).to(tl.int64)
        row_K = cache_ptr + page_K * page_stride + (tokens_K % PAGE_SIZE) * ENTRY
        latent_KL = tl.load(row_K[:, None] + cols_L[None, :], mask=ok_K[:, None] & ok_L[None, :], other=0.0).to(product)
        rope_KR = tl.load(row_K[:, None] + LATENT + cols_R[None, :], mask=ok_K[:, None] & ok_R[None, :], other=0.0).to(product)
        scores_GK = tl.dot(q_GL, tl.trans(latent_KL), input_precision="ieee")
        scores_GK = tl.dot(q_GR, tl.trans(rope_KR), scores_GK, input_precision="ieee") * scale_log2
        seen_GK = ok_K[None, :] & (tokens_K[None, :] <= positions_G[:, None])
        scores_GK = tl.where(seen_GK, scores_GK, float("-inf"))
        # A row may attend to no key of the tile. A finite maximum keeps it from becoming NaN.
        new_max_G = tl.maximum(tl.maximum(max_G, tl.max(scores_GK, 1)), -1e30)
        shrink_G = tl.exp2(max_G - new_max_G)
        probs_GK = tl.exp2(scores_GK - new_max_G[:, None])
        sum_G = sum_G * shrink_G + tl.sum(probs_GK, 1)
        acc_GL = tl.dot(probs_GK.to(product), latent_KL, acc_GL * shrink_G[:, None], input_precision="ieee")
        max_G = new_max_G

    if used_splits == 1:
        tl.store(out_GL, (acc_GL / sum_G[:, None]).to(dtype), mask=ok_GL)
        return
    if SPLITS > 1:
        # Partial results: [S, splits, rows, C] sums, then [S, splits, rows] maxima, then as many sums of exponentials.
        ROWS: tl.constexpr = MAX_QUERY * NUM_HEADS
        total = num_seqs.to(tl.int64) * (SPLITS * ROWS)
        base_G = (seq * SPLITS).to(tl.int64) * ROWS + rows_G
        row_G = base_G + split * ROWS
        max_ptr = partial_ptr + total * LATENT
        tl.store(partial_ptr + row_G[:, None] * LATENT + cols_L[None, :], acc_GL, mask=ok_GL)
        tl.store(max_ptr + row_G, max_G, mask=ok_G)
        tl.store(max_ptr + total + row_G, sum_G, mask=ok_G)
        tl.debug_barrier()
        counter = counter_ptr + seq * tl.num_programs(0) + group
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used_splits - 1:
            splits_J = tl.arange(0, SPLITS)
            at_JG = max_ptr + splits_J[:, None] * ROWS + base_G[None, :]
            ok_JG = (splits_J < used_splits)[:, None] & ok_G[None, :]
            max_JG = tl.load(at_JG, mask=ok_JG, other=float("-inf"), cache_modifier=".cg")
            sum_JG = tl.load(at_JG + total, mask=ok_JG, other=0.0, cache_modifier=".cg")
            top_G = tl.maximum(tl.max(max_JG, 0), -1e30)
            sum_G = tl.sum(sum_JG * tl.exp2(max_JG - top_G[None, :]), 0)
            acc_GL = tl.zeros((BLOCK_G, BLOCK_L), dtype=tl.float32)
            for j in tl.range(0, used_splits):
                row_G = base_G + j * ROWS
                max_part_G = tl.load(max_ptr + row_G, mask=ok_G, other=float("-inf"), cache_modifier=".cg")
                weight_G = tl.exp2(max_part_G - top_G)
                part_GL = tl.load(partial_ptr + row_G[:, None] * LATENT + cols_L[None, :], mask=ok_GL, other=0.0, cache_modifier=".cg")
                acc_GL += part_GL * weight_G[:, None]
            tl.store(out_GL, (acc_GL / sum_G[:, None]).to(dtype), mask=ok_GL)
            tl.store(counter, 0)


def decode_config(num_seqs: int, max_query: int, num_heads: int, sms: int) -> tuple[int, int, int, int, int, int]:
    """(rows of a program, tile of tokens, splits, stages, warps, min. tokens per split).

    Few sequences of one query token get many splits; where they fill the device, only long ones are split. Sequences of more query tokens
    have few configurations, because each is a kernel to compile while serving.
    """
    rows = max_query * num_heads
    programs = num_seqs * cdiv(rows, 16)
    # Tiles of 64 rows use the tensor cores better.
    block_g, block_k, stages, warps = (64, 32, 2, 8) if rows > 16 and programs >= 4 * sms else (16, 64, 3, 8)
    if max_query > 1:
        splits, min_split = 4, 256
    elif programs < sms:
        splits, min_split = next_power_of_2(min(MAX_SPLITS, cdiv(2 * sms, programs))), 64
    else:
        splits, min_split = 4, 1024
    return block_g, block_k, splits if num_seqs * splits * rows <= MAX_PARTIAL_ROWS else 1, stages, warps, min_split


def absorbed_attention(
    q_latent_HTC: torch.Tensor,
    q_rope_THR: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    query_start_loc: torch.Tensor,
    seq_lens_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    out_HTC: torch.Tensor,
    first_seq: int,
    num_seqs: int,
    max_query_len: int,
    config: tuple[int, int, int, int, int, int] | None = None,
) -> None:
    """out = softmax(scale · (q_latent cᵀ + q_rope k_rᵀ) + mask) c for num_seqs sequences from first_seq on.

    Those with more than max_query_len query tokens are left out. q_latent_HTC, out_HTC: [H, T, C], contiguous in the last two dimensions.
    q_rope_THR: contiguous. cache: [N, P, C + R], which holds the step's own entries. A sequence of length 0 is padding: it gets zeros.
    config: replaces `decode_config`'s. The metadata's tensors are as in `AttentionMetadata`.
    """
    num_heads, _, latent_size = q_latent_HTC.shape
    rope_size, device = q_rope_THR.shape[2], cache.device
    max_query = 1 if max_query_len == 1 else 4 if max_query_len <= 4 else next_power_of_2(max(16, max_query_len))
    rows = max_query * num_heads
    block_g, block_k, splits, stages, warps, min_split = config or decode_config(num_seqs, max_query, num_heads, num_sms(device))
    partial = counters = None
    if splits > 1:
        partial = torch.empty(num_seqs * splits * rows * (latent_size + 2), dtype=torch.float32, device=device)
        counters = split_counters(device)
    pdl = supports_pdl(device)
    launch(
        _mla_decode_kernel, (cdiv(rows, block_g), num_seqs, splits),
        q_latent_HTC, q_rope_THR, cache, out_HTC, partial, counters, query_start_loc, seq_lens_S, block_table_SM,
        q_latent_HTC.stride(0), out_HTC.stride(0), cache.stride(0), block_table_SM.stride(0), first_seq, num_seqs, scale * LOG2_E,
        NUM_HEADS=num_heads, LATENT=latent_size, ROPE=rope_size, PAGE_SIZE=cache.shape[1], MAX_QUERY=max_query,
        BLOCK_G=block_g, BLOCK_L=max(16, next_power_of_2(latent_size)), BLOCK_R=max(16, next_power_of_2(rope_size)), BLOCK_K=block_k,
        SPLITS=splits, MIN_SPLIT=max(block_k, min_split), STAGES=stages, PDL=pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip

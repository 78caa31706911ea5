"""`cas::fused_linear` on CUDA: the norm before a product, and SiLU-mul, bias or residual after it, in the same kernel.

Shape legend: T tokens, I input features, O output features (OH = O, or O / 2 with silu_mul: what is stored).

The kernel depends on the number of tokens. For few tokens, the limit is reading the weights:
- 1 token: each program multiplies a few rows of W by x in float32, without tensor cores (`_gemv_kernel`);
- 2 … MAX_SMALL_TOKENS: tiles of W times xᵀ on the tensor cores, split over I where there are few rows (`_small_batch_kernel`);
- up to MAX_FEW_OUTPUTS_TOKENS, where W has few rows, as a router's: the same kernel in small tiles of tokens;
- more: cuBLAS between elementwise kernels; it also adds the residual.
For few tokens, RMSNorm is free: Σ x² is summed beside the products, and 1 / rms, which is one number per token, scales the sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.linear.silu_mul_gemm import silu_mul_linear
from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.linear.triton_linear_configs import (
    MAX_FEW_OUTPUTS,
    MAX_FEW_OUTPUTS_TOKENS,
    MAX_SMALL_TOKENS,
    SmallBatchConfig,
    few_outputs_config,
    gemv_config,
    small_batch_config,
)
from compile_and_serve.custom_ops.triton_common import (
    add_pairs,
    cdiv,
    gate,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    prefetch_l2,
    prefetch_rows_l2,
    split_counters,
    supports_pdl,
    wait_for_previous,
    weight_tile,
)

MAX_NORM_TOKENS = 16  # up to here, every program of the tensor-core kernel sums the squares of x itself


@triton.jit
def _row_sums(w_OI, x_1I, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LANES: tl.constexpr):
    """Σ w · x over the LANES adjacent values of a thread: [O, I / LANES], in float32."""
    products = w_OI.to(tl.float32) * x_1I
    return tl.sum(tl.reshape(products, (BLOCK_O, BLOCK_I // LANES, LANES)), 2)


@triton.jit
def b_offsets(row, column, rank):
    """Where B[row, column] lies in a slot: in blocks of 16 columns."""
    return ((column // 16).to(tl.int64) * rank + row) * 16 + column % 16


@triton.jit
def part_of(column, end_0, end_1, end_2):
    """Which of the merged linears an output belongs to."""
    return (column >= end_0).to(tl.int32) + (column >= end_1).to(tl.int32) + (column >= end_2).to(tl.int32)


@triton.jit
def _adapter_tiles(h_ptr, b_ptr, slot, rows_O, ok_O, b_width, rank, end_0, end_1, end_2, BLOCK_R: tl.constexpr):
    """B and h of the token's LoRA adapter (`custom_ops/lora`), for some rows of the linear: [R, O] each."""
    ranks_R = tl.arange(0, BLOCK_R)
    ok_RO = (ranks_R[:, None] < tl.where(slot >= 0, rank, 0)) & ok_O[None, :]
    b_slot_ptr = b_ptr + slot * rank * tl.cdiv(b_width, 16) * 16
    b_RO = tl.load(b_slot_ptr + b_offsets(ranks_R[:, None], rows_O[None, :], rank), mask=ok_RO, other=0.0)
    part_O = part_of(rows_O, end_0, end_1, end_2)
    h_RO = tl.load(h_ptr + part_O[None, :] * rank + ranks_R[:, None], mask=ok_RO, other=0.0)
    return b_RO, h_RO


@triton.jit
def _add_adapters(
    acc_OT,
    acc_up_OT,
    h_ptr,
    b_ptr,
    index_ptr,
    groups_ptr,
    num_tokens,
    num_rows,
    rows_O,
    tile_start,
    num_h_rows,
    rank,
    end_0,
    end_1,
    end_2,
    split,
    SPLITS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + B h of the tokens' LoRA adapters. Each product has the B of several adapters, and zeros for h of other tokens.

    A tile has rows of one part only. With SiLU-mul, num_rows is a multiple of 16.
    """
    tokens_T, rows_K = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    per_block: tl.constexpr = BLOCK_K // BLOCK_R
    index_T = tl.load(index_ptr + tokens_T, mask=tokens_T < num_tokens, other=0)
    used_T = tl.load(groups_ptr + tokens_T * 4 + 3, mask=tokens_T < num_tokens, other=0)
    num_used = tl.sum((used_T > 0).to(tl.int32))
    ok_O = rows_O // 16 * 16 < num_rows  # whole blocks of B, which is padded, so that loads are wide
    rank_K = rows_K % BLOCK_R
    b_KO = b_offsets(rank_K[:, None], rows_O[None, :], rank)
    h_TK = h_ptr + tokens_T[:, None] * num_h_rows + rank_K[None, :]
    part = part_of(tile_start, end_0, end_1, end_2)
    if SILU_MUL:
        b_up_KO = b_offsets(rank_K[:, None], (num_rows + rows_O)[None, :], rank)
        up_part = part_of(num_rows + tile_start, end_0, end_1, end_2)
        slot_size = tl.cdiv(2 * num_rows, 16) * 16 * rank
    else:
        slot_size = tl.cdiv(num_rows, 16) * 16 * rank
    stages: tl.constexpr = 3 if BLOCK_K <= 128 else 1  # shared memory does not hold more of wider tiles
    for first in tl.range(split * per_block, num_used, SPLITS * per_block, num_stages=stages):
        numbers_K = first + rows_K // BLOCK_R
        index_K = tl.load(groups_ptr + numbers_K * 4 + 3, mask=numbers_K < num_tokens, other=0)
        index_K = tl.max_constancy(index_K, [BLOCK_R])
        ok_K = (index_K > 0) & (rank_K < rank)
        is_own_TK = (index_T[:, None] == index_K[None, :]) & ok_K[None, :]
        b_ptrs = b_ptr + (index_K.to(tl.int64) - 1)[:, None] * slot_size
        b = tl.load(b_ptrs + b_KO, mask=ok_K[:, None] & ok_O[None, :], other=0.0)
        h = tl.load(h_TK + part * rank, mask=is_own_TK, other=0.0)
        acc_OT = tl.dot(tl.trans(b), tl.trans(h), acc_OT, input_precision="ieee")
        if SILU_MUL:
            b_up = tl.load(b_ptrs + b_up_KO, mask=ok_K[:, None] & ok_O[None, :], other=0.0)
            h_up = tl.load(h_TK + up_part * rank, mask=is_own_TK, other=0.0)
            acc_up_OT = tl.dot(tl.trans(b_up), tl.trans(h_up), acc_up_OT, input_precision="ieee")
    return acc_OT, acc_up_OT


@triton.jit(do_not_specialize=["prefetch_blocks"])
def _gemv_kernel(
    x_ptr, w_ptr, out_ptr, norm_ptr, bias_ptr, residual_ptr, num_rows, in_features, eps, prefetch_blocks,
    h_ptr, b_ptr, index_ptr, rank, end_0, end_1, end_2,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr, GELU: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, LANES: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
    HAS_ADAPTERS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # A program runs over blocks of rows (pid, pid + programs, …) and over the chunks of columns in each, in one loop, so that the next
    # tile of weights loads while the current one is multiplied.
    first_block, num_programs = tl.program_id(0), tl.num_programs(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_O)
    num_chunks = tl.cdiv(in_features, BLOCK_I)
    cols_1I = tl.arange(0, BLOCK_I)[None, :]
    up_ptr = w_ptr + num_rows.to(tl.int64) * in_features
    # Weights do not depend on the previous kernel. While it still runs, the first tile is loaded and more tiles are prefetched into L2.
    next_w = weight_tile(w_ptr, first_block, 0, num_rows, num_blocks, in_features, BLOCK_O, BLOCK_I)
    if SILU_MUL:
        next_up = weight_tile(up_ptr, first_block, 0, num_rows, num_blocks, in_features, BLOCK_O, BLOCK_I)
    let_next_start(PDL)
    if PDL:
        block_elements = BLOCK_O * in_features.to(tl.int64)
        for i in range(0, prefetch_blocks):
            block = first_block + i * num_programs
            if (block + 1) * BLOCK_O <= num_rows:
                prefetch_l2(w_ptr + block * block_elements, block_elements, THREADS)
                if SILU_MUL:
                    prefetch_l2(up_ptr + block * block_elements, block_elements, THREADS)
    wait_for_previous(PDL)
    if HAS_ADAPTERS:
        slot = tl.load(index_ptr).to(tl.int64) - 1
        b_width = 2 * num_rows if SILU_MUL else num_rows
    acc = tl.zeros((BLOCK_O, BLOCK_I // LANES), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_O, BLOCK_I // LANES), dtype=tl.float32)
    square_1I = tl.zeros((1, BLOCK_I), dtype=tl.float32)
    inverse_rms = 1.0
    block, chunk = first_block, 0
    for _ in range(0, tl.cdiv(num_blocks - first_block, num_programs) * num_chunks):
        w = next_w
        if SILU_MUL:
            up = next_up
        here_block, here_1I = block, chunk * BLOCK_I + cols_1I
        is_last = chunk + 1 == num_chunks
        block = tl.where(is_last, block + num_programs, block)
        chunk = tl.where(is_last, 0, chunk + 1)
        next_w = weight_tile(w_ptr, block, chunk * BLOCK_I, num_rows, num_blocks, in_features, BLOCK_O, BLOCK_I)
        if SILU_MUL:
            next_up = weight_tile(up_ptr, block, chunk * BLOCK_I, num_rows, num_blocks, in_features, BLOCK_O, BLOCK_I)
        rows_O = here_block * BLOCK_O + tl.arange(0, BLOCK_O)
        ok_O = rows_O < num_rows
        if HAS_ADAPTERS:  # loads while the row is multiplied
            last_O = rows_O < tl.where(is_last, num_rows, 0)
            b_RO, h_RO = _adapter_tiles(h_ptr, b_ptr, slot, rows_O, last_O, b_width, rank, end_0, end_1, end_2, BLOCK_R)
            if SILU_MUL:
                b_up_RO, h_up_RO = _adapter_tiles(
                    h_ptr, b_ptr, slot, num_rows + rows_O, last_O, b_width, rank, end_0, end_1, end_2, BLOCK_R
                )
        x_1I = tl.load(x_ptr + here_1I, mask=here_1I < in_features, other=0.0).to(tl.float32)
        if HAS_NORM:
            if here_block == first_block:
                square_1I += x_1I * x_1I
            x_1I *= tl.load(norm_ptr + here_1I, mask=here_1I < in_features, other=0.0).to(tl.float32)
        acc += _row_sums(w, x_1I, BLOCK_O, BLOCK_I, LANES)
        if SILU_MUL:
            acc_up += _row_sums(up, x_1I, BLOCK_O, BLOCK_I, LANES)
        if is_last:
            if HAS_RESIDUAL:  # loads while the sums are reduced
                residual_O = tl.load(residual_ptr + rows_O, mask=ok_O, other=0.0).to(tl.float32)
            if HAS_NORM:
                if here_block == first_block:
                    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(square_1I) / in_features + eps)
            if SILU_MUL:
                y_O, up_O = tl.reduce((acc, acc_up), 1, add_pairs)
            else:
                y_O = tl.sum(acc, 1)
            y_O *= inverse_rms
            if HAS_BIAS:
                y_O += tl.load(bias_ptr + rows_O, mask=ok_O, other=0.0).to(tl.float32)
            if HAS_ADAPTERS:
                y_O += tl.sum(b_RO.to(tl.float32) * h_RO, 0)
            if SILU_MUL:
                up_O *= inverse_rms
                if HAS_ADAPTERS:
                    up_O += tl.sum(b_up_RO.to(tl.float32) * h_up_RO, 0)
                if HAS_BIAS:
                    up_O += tl.load(bias_ptr + num_rows + rows_O, mask=ok_O, other=0.0).to(tl.float32)
                y_O = gate(y_O, GELU) * up_O
            if HAS_RESIDUAL:
                y_O += residual_O
            tl.store(out_ptr + rows_O, y_O.to(out_ptr.dtype.element_ty), mask=ok_O)
            acc = tl.zeros((BLOCK_O, BLOCK_I // LANES), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_O, BLOCK_I // LANES), dtype=tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _small_batch_kernel(
    x_ptr, w_ptr, out_ptr, norm_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
    num_tokens, num_rows, in_features, x_stride, residual_stride, eps,
    h_ptr, b_ptr, index_ptr, groups_ptr, num_h_rows, rank, end_0, end_1, end_2,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr, GELU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr, HAS_ADAPTERS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Programs of the same rows of W and other tokens are neighbors, so that W is read from memory once.
    token_tiles = tl.cdiv(num_tokens, BLOCK_T)
    tile, split = tl.program_id(0) // token_tiles, tl.program_id(1)
    first_token = tl.program_id(0) % token_tiles * BLOCK_T
    rows_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    row_ok_O = rows_O < num_rows
    safe_rows_O = tl.where(row_ok_O, rows_O, 0).to(tl.int64)
    spots_T = tl.arange(0, BLOCK_T)
    tokens_T = first_token + spots_T
    token_ok_T = tokens_T < num_tokens
    cols_I = tl.arange(0, BLOCK_I)
    per_split = tl.cdiv(tl.cdiv(in_features, BLOCK_I), SPLITS) * BLOCK_I
    begin = split * per_split
    let_next_start(PDL)
    if PDL and PREFETCH:  # weights do not depend on the previous kernel, which may still run
        if (first_token == 0) & (begin < in_features):
            prefetch_rows_l2(w_ptr + safe_rows_O * in_features + begin, tl.minimum(per_split, in_features - begin))
    wait_for_previous(PDL)
    acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    square_TI = tl.zeros((BLOCK_T, BLOCK_I), dtype=tl.float32)
    w_OI = w_ptr + safe_rows_O[:, None] * in_features + cols_I[None, :]
    up_OI = w_OI + num_rows.to(tl.int64) * in_features
    for start in tl.range(begin, tl.minimum(begin + per_split, in_features), BLOCK_I, num_stages=STAGES):
        here_I = start + cols_I
        ok_1I = here_I[None, :] < in_features
        w = tl.load(w_OI + start, mask=ok_1I, other=0.0, eviction_policy="evict_first")
        x_TI = tl.load(x_ptr + tokens_T[:, None] * x_stride + here_I[None, :], mask=token_ok_T[:, None] & ok_1I, other=0.0)
        if HAS_NORM:
            x32_TI = x_TI.to(tl.float32)
            square_TI += x32_TI * x32_TI
            norm_1I = tl.load(norm_ptr + here_I[None, :], mask=ok_1I, other=0.0).to(tl.float32)
            x_TI = (x32_TI * norm_1I).to(x_ptr.dtype.element_ty)
        x_IT = tl.trans(x_TI)
        acc_OT = tl.dot(w, x_IT, acc_OT, input_precision="ieee")
        if SILU_MUL:
            up = tl.load(up_OI + start, mask=ok_1I, other=0.0, eviction_policy="evict_first")
            acc_up_OT = tl.dot(up, x_IT, acc_up_OT, input_precision="ieee")
    if HAS_ADAPTERS:
        acc_OT, acc_up_OT = _add_adapters(
            acc_OT,
            acc_up_OT,
            h_ptr,
            b_ptr,
            index_ptr,
            groups_ptr,
            num_tokens,
            num_rows,
            rows_O,
            tile * BLOCK_O,
            num_h_rows,
            rank,
            end_0,
            end_1,
            end_2,
            split,
            SPLITS,
            SILU_MUL,
            BLOCK_T,
            BLOCK_R,
            BLOCK_K,
        )
    square_T = tl.sum(square_TI, 1)
    last = True
    if SPLITS > 1:
        # Each split stores partial sums. The last program of the tile adds them in order, so that every run has the same bits.
        size = BLOCK_O * BLOCK_T
        spots_OT = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + spots_T[None, :]
        width = 2 * size + BLOCK_T
        counter = counter_ptr + tl.program_id(0)
        partials = partial_ptr + tl.program_id(0).to(tl.int64) * SPLITS * width
        mine = partials + split * width
        tl.store(mine + spots_OT, acc_OT)
        if SILU_MUL:
            tl.store(mine + size + spots_OT, acc_up_OT)
        if HAS_NORM:
            tl.store(mine + 2 * size + spots_T, square_T)
        tl.debug_barrier()
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            square_T = tl.zeros((BLOCK_T,), dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = partials + other * width
                acc_OT += tl.load(theirs + spots_OT, cache_modifier=".cg")
                if SILU_MUL:
                    acc_up_OT += tl.load(theirs + size + spots_OT, cache_modifier=".cg")
                if HAS_NORM:
                    square_T += tl.load(theirs + 2 * size + spots_T, cache_modifier=".cg")
            tl.store(counter, 0)
    if last:
        if HAS_NORM:
            inverse_rms_1T = (1.0 / tl.sqrt_rn(square_T / in_features + eps))[None, :]
            acc_OT *= inverse_rms_1T
            acc_up_OT *= inverse_rms_1T
        if HAS_BIAS:
            acc_OT += tl.load(bias_ptr + safe_rows_O).to(tl.float32)[:, None]
            if SILU_MUL:
                acc_up_OT += tl.load(bias_ptr + num_rows + safe_rows_O).to(tl.float32)[:, None]
        if SILU_MUL:
            acc_OT = gate(acc_OT, GELU) * acc_up_OT
        ok_OT = row_ok_O[:, None] & token_ok_T[None, :]
        if HAS_RESIDUAL:
            residual = residual_ptr + tokens_T[None, :] * residual_stride + rows_O[:, None]
            acc_OT += tl.load(residual, mask=ok_OT, other=0.0).to(tl.float32)
        out = out_ptr + tokens_T[None, :] * num_rows + rows_O[:, None]
        tl.store(out, acc_OT.to(out_ptr.dtype.element_ty), mask=ok_OT)


def fused_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """As `cas::fused_linear`, over the plain weight [O, I]. The host does not wait for the device; the kernel depends on T alone."""
    num_tokens = x_TI.shape[0]
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    if residual_TO is not None and residual_TO.stride(1) != 1:
        residual_TO = residual_TO.contiguous()
    if takes_gemv(x_TI, weight_OI):
        return gemv(x_TI, weight_OI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu)
    has_few_outputs = takes_few_outputs(x_TI, weight_OI, silu_mul)
    runs_small = has_few_outputs or takes_small_batch(x_TI, weight_OI)
    if norm_weight_I is not None and not (runs_small and num_tokens <= MAX_NORM_TOKENS):
        x_TI, norm_weight_I = rms_norm(x_TI, norm_weight_I, eps), None
    if runs_small:
        config = few_outputs_config(*weight_OI.shape) if has_few_outputs else None
        return small_batch(x_TI, weight_OI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu, config)
    if bias_O is not None or gelu:
        y_TO = F.linear(x_TI, weight_OI, bias_O)
        y_TO = silu_mul_rows(y_TO, gelu=gelu) if silu_mul else y_TO
    elif silu_mul:
        y_TO = silu_mul_linear(x_TI, weight_OI, min_tokens=MAX_SMALL_TOKENS + 1)
    elif residual_TO is not None:
        return torch.addmm(residual_TO, x_TI, weight_OI.t())  # one rounding, after the addition
    else:
        return F.linear(x_TI, weight_OI)
    return y_TO if residual_TO is None else y_TO + residual_TO


def takes_gemv(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `gemv` computes this linear."""
    return x_TI.shape[0] == 1 and _is_plain(x_TI, weight_OI)


def takes_small_batch(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `small_batch` computes this linear."""
    return 1 < x_TI.shape[0] <= MAX_SMALL_TOKENS and _is_plain(x_TI, weight_OI) and x_TI.dtype != torch.float32


def takes_few_outputs(x_TI: torch.Tensor, weight_OI: torch.Tensor, silu_mul: bool) -> bool:
    """Whether `small_batch` computes this linear with `few_outputs_config`."""
    return (
        MAX_NORM_TOKENS < x_TI.shape[0] <= MAX_FEW_OUTPUTS_TOKENS
        and weight_OI.shape[0] <= MAX_FEW_OUTPUTS
        and not silu_mul
        and _is_plain(x_TI, weight_OI)
        and x_TI.dtype != torch.float32
    )


def _is_plain(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    return weight_OI.stride() == (x_TI.shape[1], 1) and x_TI.dtype == weight_OI.dtype


def gemv(
    x_1I: torch.Tensor,
    weight_OI: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_1O: torch.Tensor | None,
    gelu: bool = False,
    config: tuple[int, int, int, int] | None = None,
    adapters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]] | None = None,
) -> torch.Tensor:
    """`fused_linear` of one token. adapters: h = A x float32 [Q], B [S, ceil(O / 16), R, 16], the token's index, and where the first
    three parts end.
    """
    in_features, device = x_1I.shape[1], x_1I.device
    num_rows = out_features // 2 if silu_mul else out_features
    h, b, index, ends = adapters or (None, None, None, (0, 0, 0))
    rank = 1 if b is None else b.shape[2]
    rows, warps, per_sm, prefetch_mib = config or gemv_config(num_rows, in_features, silu_mul)
    # 16 bytes per thread, so that x has the layout of a row of W and broadcasting it moves no data.
    lanes = 16 // x_1I.element_size()
    out = x_1I.new_empty(1, num_rows)
    pdl = supports_pdl(device)
    num_programs = min(cdiv(num_rows, rows), per_sm * num_sms(device))
    block_bytes = rows * in_features * x_1I.element_size()
    round_bytes = num_programs * block_bytes * (2 if silu_mul else 1)
    # Each thread prefetches a part of a block, of at least 16 bytes.
    prefetch_blocks = (prefetch_mib << 20) // round_bytes if block_bytes % (16 * 32 * warps) == 0 else 0
    launch(
        _gemv_kernel, (num_programs,),
        x_1I, weight_OI, out, norm_weight_I, bias_O, residual_1O, num_rows, in_features, eps, prefetch_blocks,
        h, b, index, rank, *ends,
        HAS_NORM=norm_weight_I is not None, HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_1O is not None, SILU_MUL=silu_mul,
        GELU=gelu, BLOCK_O=rows, BLOCK_I=32 * warps * lanes, LANES=lanes, THREADS=32 * warps, PDL=pdl,
        HAS_ADAPTERS=adapters is not None, BLOCK_R=next_power_of_2(rank), num_warps=warps,
        **launch_options(pdl),
    )  # fmt: skip
    return out


def small_batch(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
    gelu: bool = False,
    config: SmallBatchConfig | None = None,
    adapters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]] | None = None,
) -> torch.Tensor:
    """`fused_linear` of 2 to MAX_SMALL_TOKENS tokens, or more with a config. adapters: h = A x [T, Q], B [S, ceil(O / 16), R, 16],
    the tokens' indices, their `lora_groups`, and where the first three parts end, at multiples of SMALL_BLOCK_O; only without a norm.
    """
    assert adapters is None or norm_weight_I is None, "the norm scales the sums last, and h is not to be scaled"
    num_tokens, in_features = x_TI.shape
    h, b, index, groups, ends = adapters or (None, None, None, None, (0, 0, 0))
    num_h_rows, rank = (1, 1) if h is None or b is None else (h.shape[1], b.shape[2])
    block_r = max(16, next_power_of_2(rank))
    num_rows = out_features // 2 if silu_mul else out_features
    config = config or small_batch_config(num_tokens, num_rows, in_features, silu_mul, num_sms(x_TI.device))
    block_o, splits = config.block_o, config.splits
    block_t = min(config.block_t, max(16, next_power_of_2(num_tokens)))
    assert adapters is None or num_tokens <= block_t, "adapters are added to one tile of tokens"
    tiles = cdiv(num_rows, block_o) * cdiv(num_tokens, block_t)
    out = x_TI.new_empty(num_tokens, num_rows)
    partial = counters = None
    if splits > 1:
        partial = torch.empty(tiles * splits * (2 * block_o * block_t + block_t), dtype=torch.float32, device=x_TI.device)
        counters = split_counters(x_TI.device)
    pdl = supports_pdl(x_TI.device)
    launch(
        _small_batch_kernel, (tiles, splits),
        x_TI, weight_OI, out, norm_weight_I, bias_O, residual_TO, partial, counters,
        num_tokens, num_rows, in_features, x_TI.stride(0), residual_TO.stride(0) if residual_TO is not None else 0, eps,
        h, b, index, groups, num_h_rows, rank, *ends,
        HAS_NORM=norm_weight_I is not None, HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_TO is not None, SILU_MUL=silu_mul,
        GELU=gelu, BLOCK_T=block_t, BLOCK_O=block_o, BLOCK_I=config.block_i, SPLITS=splits, STAGES=config.stages,
        PREFETCH=config.prefetch, PDL=pdl,
        HAS_ADAPTERS=adapters is not None, BLOCK_R=block_r, BLOCK_K=max(128, block_r),
        num_warps=config.warps, **launch_options(pdl),
    )  # fmt: skip
    return out

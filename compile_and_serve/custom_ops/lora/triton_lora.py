"""`cas::lora_add` on a GPU: shrink (x Aᵀ) and expand (+ h Bᵀ), two kernels per linear, without a host sync.

The results of shrink are float32 partial sums over parts of the input features, which expand adds up in a fixed order: a few
tokens alone would not fill the device, and atomics would not be deterministic.

Up to `MAX_ROWS` tokens, each program takes one token and reads only its adapter. For more tokens, a program takes a block of
consecutive tokens and multiplies it by each adapter that the block uses. Tokens of a prompt are consecutive, so a block of a
prefill mostly uses one or two adapters; tokens need not be sorted.

Shape legend: T tokens, I and O input and output features, S adapter slots, R the largest rank, P parts of the features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.build.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2

MAX_ROWS = 64
BLOCK_T = 32
MAX_PARTS = 8


@triton.jit
def _shrink_rows_kernel(
    x_ptr, a_ptr, index_ptr, h_ptr, num_tokens, num_features, rank, x_stride, part_size,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    index = tl.load(index_ptr + token).to(tl.int64)
    if index > 0:
        rows_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        a_row_ptrs = a_ptr + ((index - 1) * rank + rows_R[:, None]) * num_features
        sums_RI = tl.zeros((BLOCK_R, BLOCK_I), dtype=tl.float32)
        end = tl.minimum((part + 1) * part_size, num_features)
        for start in range(part * part_size, end, BLOCK_I):
            cols_I = start + tl.arange(0, BLOCK_I)
            ok_I = cols_I < end
            x_I = tl.load(x_ptr + token * x_stride + cols_I, mask=ok_I, other=0.0).to(tl.float32)
            ok_RI = (rows_R[:, None] < rank) & ok_I[None, :]
            a_RI = tl.load(a_row_ptrs + cols_I[None, :], mask=ok_RI, other=0.0).to(tl.float32)
            sums_RI += a_RI * x_I[None, :]
        h_R = tl.sum(sums_RI, axis=1)
        tl.store(h_ptr + (part * num_tokens + token) * rank + rows_R, h_R, mask=rows_R < rank)


@triton.jit
def _expand_rows_kernel(
    y_ptr, h_ptr, b_ptr, index_ptr, out_ptr, num_tokens, num_features, rank, y_stride,
    PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = cols_O < num_features
    index = tl.load(index_ptr + token).to(tl.int64)
    sums_O = tl.load(y_ptr + token * y_stride + cols_O, mask=ok_O, other=0.0).to(tl.float32)
    if index > 0:
        rows_R = tl.arange(0, BLOCK_R)
        h_R = tl.zeros((BLOCK_R,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            h_R += tl.load(h_ptr + (part * num_tokens + token) * rank + rows_R, mask=rows_R < rank, other=0.0)
        ok_OR = ok_O[:, None] & (rows_R[None, :] < rank)
        at_OR = ((index - 1) * num_features + cols_O[:, None]) * rank + rows_R[None, :]
        b_OR = tl.load(b_ptr + at_OR, mask=ok_OR, other=0.0).to(tl.float32)
        sums_O += tl.sum(b_OR * h_R[None, :], axis=1)
    tl.store(out_ptr + token * num_features + cols_O, sums_O.to(out_ptr.dtype.element_ty), mask=ok_O)


@triton.jit
def _shrink_blocks_kernel(
    x_ptr, a_ptr, index_ptr, h_ptr, num_tokens, num_features, rank, x_stride, part_size,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(2)
    index_T = tl.load(index_ptr + tokens_T, mask=tokens_T < num_tokens, other=0)
    rows_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    end = tl.minimum((part + 1) * part_size, num_features)
    x_ptrs = x_ptr + tokens_T.to(tl.int64)[:, None] * x_stride
    sums_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    index = tl.min(tl.where(index_T > 0, index_T, 1 << 30))
    last = tl.max(index_T)
    while index <= last:
        own_T = index_T == index
        a_ptrs = a_ptr + ((index - 1).to(tl.int64) * rank + rows_R[:, None]) * num_features
        for start in range(part * part_size, end, BLOCK_I):
            cols_I = start + tl.arange(0, BLOCK_I)
            ok_I = cols_I < end
            x_TI = tl.load(x_ptrs + cols_I[None, :], mask=own_T[:, None] & ok_I[None, :], other=0.0)
            ok_RI = (rows_R[:, None] < rank) & ok_I[None, :]
            a_RI = tl.load(a_ptrs + cols_I[None, :], mask=ok_RI, other=0.0)
            sums_TR = tl.dot(x_TI, tl.trans(a_RI), sums_TR, input_precision="ieee")
        index = tl.min(tl.where(index_T > index, index_T, 1 << 30))
    at_TR = (part * num_tokens + tokens_T.to(tl.int64)[:, None]) * rank + rows_R[None, :]
    tl.store(h_ptr + at_TR, sums_TR, mask=(tokens_T[:, None] < num_tokens) & (rows_R[None, :] < rank))


@triton.jit
def _expand_blocks_kernel(
    y_ptr, h_ptr, b_ptr, index_ptr, out_ptr, num_tokens, num_features, rank, y_stride,
    PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    index_T = tl.load(index_ptr + tokens_T, mask=tokens_T < num_tokens, other=0)
    ok_TO = (tokens_T[:, None] < num_tokens) & (cols_O[None, :] < num_features)
    rows_T = tokens_T.to(tl.int64)
    sums_TO = tl.load(y_ptr + rows_T[:, None] * y_stride + cols_O[None, :], mask=ok_TO, other=0.0).to(tl.float32)
    index = tl.min(tl.where(index_T > 0, index_T, 1 << 30))
    last = tl.max(index_T)
    while index <= last:
        own_T = index_T == index
        b_ptrs = b_ptr + ((index - 1).to(tl.int64) * num_features + cols_O[:, None]) * rank
        for start in range(0, rank, BLOCK_R):
            rows_R = start + tl.arange(0, BLOCK_R)
            ok_TR = own_T[:, None] & (rows_R[None, :] < rank)
            h_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
            for part in tl.static_range(PARTS):
                at_TR = (part * num_tokens + rows_T[:, None]) * rank + rows_R[None, :]
                h_TR += tl.load(h_ptr + at_TR, mask=ok_TR, other=0.0)
            ok_OR = (cols_O[:, None] < num_features) & (rows_R[None, :] < rank)
            b_OR = tl.load(b_ptrs + rows_R[None, :], mask=ok_OR, other=0.0)
            sums_TO = tl.dot(h_TR.to(b_OR.dtype), tl.trans(b_OR), sums_TO, input_precision="ieee")
        index = tl.min(tl.where(index_T > index, index_T, 1 << 30))
    at_TO = rows_T[:, None] * num_features + cols_O[None, :]
    tl.store(out_ptr + at_TO, sums_TO.to(out_ptr.dtype.element_ty), mask=ok_TO)


def lora_add(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_SRI: torch.Tensor, b_SOR: torch.Tensor, index_T: torch.Tensor
) -> torch.Tensor:
    """`custom_ops.lora.lora_add.lora_add` for inputs whose rows are contiguous."""
    (num_tokens, num_out), num_in = y_TO.shape, x_TI.shape[1]
    rank = a_SRI.shape[1]
    out_TO = y_TO.new_empty(num_tokens, num_out)
    if num_tokens == 0:
        return out_TO
    by_rows = num_tokens <= MAX_ROWS
    block_i = min(512 if by_rows else 128, max(16, next_power_of_2(num_in)))
    block_r = min(4 if by_rows else 64, max(1 if by_rows else 16, next_power_of_2(rank)))
    parts = max(1, min(_parts(num_tokens, by_rows=by_rows), num_in // (2 * block_i)))
    part_size = cdiv(cdiv(num_in, parts), block_i) * block_i
    parts = cdiv(num_in, part_size)
    h_PTR = torch.empty(parts, num_tokens, rank, dtype=torch.float32, device=y_TO.device)
    shrink = (x_TI, a_SRI, index_T, h_PTR, num_tokens, num_in, rank, x_TI.stride(0), part_size)
    expand = (y_TO, h_PTR, b_SOR, index_T, out_TO, num_tokens, num_out, rank, y_TO.stride(0))
    if by_rows:
        grid = (num_tokens, cdiv(rank, block_r), parts)
        launch(_shrink_rows_kernel, grid, *shrink, BLOCK_R=block_r, BLOCK_I=block_i, num_warps=4)
        whole_rank = next_power_of_2(rank)
        block_o = max(16, min(256, 4096 // whole_rank, next_power_of_2(num_out)))
        launch(
            _expand_rows_kernel, (num_tokens, cdiv(num_out, block_o)), *expand,
            PARTS=parts, BLOCK_R=whole_rank, BLOCK_O=block_o, num_warps=4,
        )  # fmt: skip
        return out_TO
    blocks_T = cdiv(num_tokens, BLOCK_T)
    grid = (blocks_T, cdiv(rank, block_r), parts)
    launch(_shrink_blocks_kernel, grid, *shrink, BLOCK_T=BLOCK_T, BLOCK_R=block_r, BLOCK_I=block_i, num_warps=4)
    block_o = min(128, max(16, next_power_of_2(num_out)))
    launch(
        _expand_blocks_kernel, (blocks_T, cdiv(num_out, block_o)), *expand,
        PARTS=parts, BLOCK_T=BLOCK_T, BLOCK_R=min(block_r, 32), BLOCK_O=block_o, num_warps=4,
    )  # fmt: skip
    return out_TO


def _parts(num_tokens: int, *, by_rows: bool) -> int:
    """More parts for fewer tokens. Equal for all counts up to a power of 2, because kernels are compiled for the number of parts."""
    min_tokens = 8 if by_rows else 2 * MAX_ROWS
    return max(1, MAX_PARTS * min_tokens // max(min_tokens, next_power_of_2(num_tokens)))

"""Short convolutions: one kernel for the sums, and one for the ring of inputs, which begins when the sums are done.

Shape legend: S sequences, D channels, W width, R ring entries, C channels in a program, N tokens in a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.recurrent.layer_state import ROLLBACK_TOKENS, StatePart
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata
from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2

_TOKENS = 16  # of a program, in prompts


@triton.jit
def _ring_offsets(columns_ptr, pages_ptr, channels_C, page_stride, UNITS: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr):
    """Where each channel's entry 0 lies: elements from the state's beginning."""
    unit_C = channels_C // CHANNELS
    page_C = tl.load(pages_ptr + tl.load(columns_ptr + unit_C // UNITS)).to(tl.int64)
    return page_C * page_stride + (unit_C % UNITS) * RING * CHANNELS + channels_C % CHANNELS


@triton.jit
def _sums_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, inputs_ptr, columns_ptr, start_loc_ptr, seq_lens_ptr, read_ptr,
    x_stride, page_stride, read_stride,
    D: tl.constexpr, W: tl.constexpr, RING: tl.constexpr, UNITS: tl.constexpr, CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr, STRIDE_C: tl.constexpr, STRIDE_W: tl.constexpr,
):  # fmt: skip
    """STRIDE_C, STRIDE_W: of the weight, for a channel and a tap."""
    seq = tl.program_id(2)
    start, length = tl.load(start_loc_ptr + seq), tl.load(seq_lens_ptr + seq)
    num_new = tl.load(start_loc_ptr + seq + 1) - start
    computed = length - num_new
    first = tl.program_id(1) * TOKENS
    if length > 0 and first < num_new:
        channels_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        ok_C = channels_C < D
        ring_C = channels_C.to(tl.int64)
        if first < W - 1:
            safe_C = tl.where(ok_C, channels_C, 0)
            ring_C = _ring_offsets(columns_ptr, read_ptr + seq * read_stride, safe_C, page_stride, UNITS, RING, CHANNELS)
        sum_NC = tl.zeros((TOKENS, BLOCK_C), tl.float32)
        if HAS_BIAS:
            sum_NC += tl.load(bias_ptr + channels_C, mask=ok_C, other=0.0).to(tl.float32)[None, :]
        token_N = first + tl.arange(0, TOKENS)
        for w in tl.static_range(W):
            offset_N = token_N - (W - 1) + w  # of the input among the new tokens
            is_new_N = (offset_N >= 0) & (token_N < num_new)
            rows_N = (start + offset_N).to(tl.int64)
            weight_C = tl.load(weight_ptr + channels_C * STRIDE_C + w * STRIDE_W, mask=ok_C, other=0.0).to(tl.float32)
            x_NC = tl.load(x_ptr + rows_N[:, None] * x_stride + channels_C[None, :], mask=is_new_N[:, None] & ok_C[None, :], other=0.0)
            sum_NC += weight_C[None, :] * x_NC.to(tl.float32)
            if first < W - 1:
                is_kept_N = (offset_N < 0) & (computed + offset_N >= 0) & (token_N < num_new)
                entry_N = tl.maximum(computed + offset_N, 0) % RING
                entry_NC = inputs_ptr + ring_C[None, :] + entry_N[:, None] * CHANNELS
                kept_NC = tl.load(entry_NC, mask=is_kept_N[:, None] & ok_C[None, :], other=0.0)
                sum_NC += weight_C[None, :] * kept_NC.to(tl.float32)
        rows_N = (start + token_N).to(tl.int64)
        is_out_NC = (token_N < num_new)[:, None] & ok_C[None, :]
        tl.store(out_ptr + rows_N[:, None] * D + channels_C[None, :], sum_NC.to(out_ptr.dtype.element_ty), mask=is_out_NC)


@triton.jit
def _ring_kernel(
    x_ptr, inputs_ptr, columns_ptr, start_loc_ptr, seq_lens_ptr, read_ptr, write_ptr, x_stride, page_stride, read_stride, write_stride,
    D: tl.constexpr, RING: tl.constexpr, UNITS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1)
    start, length = tl.load(start_loc_ptr + seq), tl.load(seq_lens_ptr + seq)
    computed = length - (tl.load(start_loc_ptr + seq + 1) - start)
    if length > 0 and computed < length:
        channels_C = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        ok_C = channels_C < D
        safe_C = tl.where(ok_C, channels_C, 0)
        old_C = _ring_offsets(columns_ptr, read_ptr + seq * read_stride, safe_C, page_stride, UNITS, RING, CHANNELS)
        new_C = _ring_offsets(columns_ptr, write_ptr + seq * write_stride, safe_C, page_stride, UNITS, RING, CHANNELS)
        oldest = tl.maximum(0, length - RING)
        for position in range(tl.maximum(oldest, computed), length):
            x_C = tl.load(x_ptr + (start + position - computed).to(tl.int64) * x_stride + channels_C, mask=ok_C, other=0.0)
            tl.store(inputs_ptr + new_C + position % RING * CHANNELS, x_C, mask=ok_C)
        if tl.max((old_C != new_C).to(tl.int32), axis=0) > 0:
            for position in range(oldest, computed):
                kept_C = tl.load(inputs_ptr + old_C + position % RING * CHANNELS, mask=ok_C, other=0.0)
                tl.store(inputs_ptr + new_C + position % RING * CHANNELS, kept_C, mask=ok_C & (old_C != new_C))


def short_convolution(
    x_TD: torch.Tensor, weight_DW: torch.Tensor, bias_D: torch.Tensor | None, state: StatePart, metadata: SlotMetadata
) -> torch.Tensor:
    """`cas::short_convolution`. Padding is 0."""
    inputs, columns = state
    channels, width = x_TD.shape[1], weight_DW.shape[1]
    num_seqs, ring = len(metadata.seq_lens), inputs.shape[2]
    block = min(256, next_power_of_2(channels))
    tokens = min(_TOKENS, next_power_of_2(metadata.max_query_len))
    has_prompts = metadata.max_query_len > ROLLBACK_TOKENS + 1
    out_TD = metadata.new_output(x_TD, may_be_captured=not has_prompts)
    if has_prompts:  # a program then loads its weights for a tap as one piece, not number by number, which takes longer than the inputs
        weight_DW = weight_DW.t().contiguous().t()
    sizes = {"D": channels, "RING": ring, "UNITS": inputs.shape[1], "CHANNELS": inputs.shape[3], "BLOCK_C": block}
    lengths = metadata.query_start_loc, metadata.seq_lens
    read, write = metadata.read_pages, metadata.write_pages
    launch(
        _sums_kernel,
        (cdiv(channels, block), cdiv(metadata.max_query_len, tokens), num_seqs),
        x_TD,
        weight_DW,
        bias_D,
        out_TD,
        inputs,
        columns,
        *lengths,
        read,
        x_TD.stride(0),
        inputs.stride(0),
        read.stride(0),
        **sizes,
        W=width,
        HAS_BIAS=bias_D is not None,
        TOKENS=tokens,
        STRIDE_C=weight_DW.stride(0),
        STRIDE_W=weight_DW.stride(1),
        num_warps=4,
    )
    launch(
        _ring_kernel,
        (cdiv(channels, block), num_seqs),
        x_TD,
        inputs,
        columns,
        *lengths,
        read,
        write,
        x_TD.stride(0),
        inputs.stride(0),
        read.stride(0),
        write.stride(0),
        **sizes,
        num_warps=4,
    )
    return out_TD

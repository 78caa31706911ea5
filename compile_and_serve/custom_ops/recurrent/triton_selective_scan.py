"""The scan of Mamba-1: one kernel for a few new tokens per sequence, and prompts in chunks that run side by side.

Shape legend: S sequences, I channels, U blocks of channels, C channels of a block, N size of a channel's state, R ring entries, L tokens
of a chunk.

A program has the states of one block of channels in registers. It takes up the later state, or the checkpoint where that does not do
(`layer_state.py`), with the entries since then, and goes on token by token.

Tokens of prompts before the next checkpoint are computed in three launches: each chunk's state from zeros, with its sum of dt; the state
at each chunk's beginning, from which the checkpoint follows; the outputs of each chunk. The tokens from the checkpoint on come last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.recurrent.layer_state import CHECKPOINT_TOKENS, ROLLBACK_TOKENS, StatePart
from compile_and_serve.custom_ops.recurrent.triton_linear_attention import unit_offset
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata
from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2

BLOCK = tl.constexpr(CHECKPOINT_TOKENS)
LOG2_E = tl.constexpr(1.4426950408889634)
# What a launch computes: all; the states at the beginnings of chunks, and the next checkpoint; the tokens from that on.
ALL, TO_CHECKPOINT, FROM_CHECKPOINT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CHUNK, _MAX_CHUNKS = 64, 128  # tokens of a chunk at least; chunks of a step, beside one more for each sequence


@triton.jit
def _softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + z) with z = e^-|x|, and log(1 + z) = 2 atanh(z / (2 + z))."""
    z = tl.exp(-tl.abs(x))
    s = z / (z + 2.0)
    square = s * s
    p = square / 13.0 + 1.0 / 11.0
    p = p * square + 1.0 / 9.0
    p = p * square + 1.0 / 7.0
    p = p * square + 1.0 / 5.0
    p = p * square + 1.0 / 3.0
    p = p * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def _stepped(state_NC, rates_NC, dt_C, x_C, b_N):
    """The state after a token."""
    return tl.exp2(dt_C[None, :] * rates_NC) * state_NC + b_N[:, None] * (dt_C * x_C)[None, :]


@triton.jit
def _scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, out_ptr, local_ptr, total_ptr,
    states_ptr, states_columns_ptr, inputs_ptr, inputs_columns_ptr, keys_ptr, keys_columns_ptr, positions_ptr, positions_columns_ptr,
    start_loc_ptr, seq_lens_ptr, read_ptr, write_ptr,
    x_stride, dt_stride, b_stride, c_stride, states_stride, inputs_stride, keys_stride, positions_stride, read_stride, write_stride,
    CHANNELS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, RING: tl.constexpr, STATE_UNITS: tl.constexpr, INPUT_UNITS: tl.constexpr,
    KEY_UNITS: tl.constexpr, POSITION_UNITS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    unit, seq = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens_ptr + seq)
    start = tl.load(start_loc_ptr + seq)
    computed = length - (tl.load(start_loc_ptr + seq + 1) - start)
    end = tl.maximum(computed, length - (RING - BLOCK - 1)) // BLOCK * BLOCK  # where the checkpoint will lie
    new_later = tl.where(length - computed > BLOCK, length, computed + 1)
    has_work = (length > 0) & (computed < length)
    if PART == TO_CHECKPOINT:
        has_work &= end > computed
    if has_work:
        read, write = read_ptr + seq * read_stride, write_ptr + seq * write_stride
        rows_N, cols_C = tl.arange(0, BLOCK_N), tl.arange(0, C)
        ok_N = rows_N < N
        ok_NC = ok_N[:, None] & (cols_C >= 0)[None, :]
        cells_NC = rows_N[:, None] * C + cols_C[None, :]
        channels_C = unit * C + cols_C
        rates_NC = tl.load(a_ptr + channels_C[None, :] * N + rows_N[:, None], mask=ok_NC, other=0.0) * LOG2_E
        source = unit_offset(states_columns_ptr, read, unit, states_stride, STATE_UNITS, 2 * N * C)
        target = unit_offset(states_columns_ptr, write, unit, states_stride, STATE_UNITS, 2 * N * C)
        moves = source != target
        old_states, new_states = states_ptr + source + cells_NC, states_ptr + target + cells_NC
        old_inputs = inputs_ptr + unit_offset(inputs_columns_ptr, read, unit, inputs_stride, INPUT_UNITS, RING * 2 * C) + cols_C
        new_inputs = inputs_ptr + unit_offset(inputs_columns_ptr, write, unit, inputs_stride, INPUT_UNITS, RING * 2 * C) + cols_C
        old_keys = keys_ptr + unit_offset(keys_columns_ptr, read, unit, keys_stride, KEY_UNITS, RING * N) + rows_N
        new_keys = keys_ptr + unit_offset(keys_columns_ptr, write, unit, keys_stride, KEY_UNITS, RING * N) + rows_N
        old_positions = positions_ptr + unit_offset(positions_columns_ptr, read, unit, positions_stride, POSITION_UNITS, 2)
        new_positions = positions_ptr + unit_offset(positions_columns_ptr, write, unit, positions_stride, POSITION_UNITS, 2)
        begin = end * 0
        state_NC = tl.zeros((BLOCK_N, C), tl.float32)
        if PART == FROM_CHECKPOINT and end > computed:  # another launch made it
            start += end - computed
            computed, begin, moves = end, end, end < 0
            new_later = tl.where(new_later > end, new_later, -1)  # none, where it is the checkpoint
            state_NC = tl.load(new_states, mask=ok_NC, other=0.0).to(tl.float32)
        elif computed > 0:
            latest = computed // BLOCK * BLOCK
            earliest = tl.maximum(0, (computed - RING + BLOCK) // BLOCK * BLOCK)
            stored = tl.load(old_positions).to(tl.int32) // BLOCK * BLOCK
            checkpoint = tl.minimum(tl.maximum(stored, earliest), latest)
            later = tl.load(old_positions + 1)
            later = tl.where((later >= 0) & (later <= computed), later, -1.0).to(tl.int32)
            passes = (checkpoint < end) & (end < later)  # the state at the next checkpoint lies before the later one
            from_later = (later >= tl.maximum(checkpoint, 1)) & (computed - later < RING) & (passes == 0)
            begin = tl.where(from_later, later, checkpoint)
            if begin > 0:
                state_NC = tl.load(old_states + tl.where(from_later, N * C, 0), mask=ok_NC, other=0.0).to(tl.float32)
            if moves and begin > end:
                kept_NC = tl.load(old_states, mask=ok_NC, other=0.0)
                tl.store(new_states, kept_NC, mask=ok_NC)

        # The entries since the state that was taken up. Those behind the checkpoint are copied to other pages.
        first = begin
        if moves:
            first = tl.minimum(begin, end)
        for position in range(first, computed):
            entry = position % RING
            raw_C = tl.load(old_inputs + entry * 2 * C)
            x_C = tl.load(old_inputs + entry * 2 * C + C)
            b_N = tl.load(old_keys + entry * N, mask=ok_N, other=0.0)
            if position == end and position >= begin:
                tl.store(new_states, state_NC.to(states_ptr.dtype.element_ty), mask=ok_NC)
            if moves and position >= end:
                tl.store(new_inputs + entry * 2 * C, raw_C)
                tl.store(new_inputs + entry * 2 * C + C, x_C)
                tl.store(new_keys + entry * N, b_N, mask=ok_N)
            if position >= begin:
                state_NC = _stepped(state_NC, rates_NC, _softplus(raw_C.to(tl.float32)), x_C.to(tl.float32), b_N.to(tl.float32))
        tl.debug_barrier()

        if PART == TO_CHECKPOINT:
            slot = start // CHUNK + seq
            for number in range(0, tl.cdiv(end - computed, CHUNK)):
                at = ((slot + number) * (CHANNELS // C) + unit).to(tl.int64)
                local_NC = tl.load(local_ptr + at * N * C + cells_NC, mask=ok_NC, other=0.0)
                total_C = tl.load(total_ptr + at * C + cols_C)
                tl.store(local_ptr + at * N * C + cells_NC, state_NC, mask=ok_NC)
                state_NC = tl.exp2(total_C[None, :] * rates_NC) * state_NC + local_NC
            tl.store(new_states, state_NC.to(states_ptr.dtype.element_ty), mask=ok_NC)
        else:
            for position in range(computed, length):
                if position == end:
                    tl.store(new_states, state_NC.to(states_ptr.dtype.element_ty), mask=ok_NC)
                token = (start + position - computed).to(tl.int64)
                raw_C = tl.load(dt_ptr + token * dt_stride + channels_C)
                x_C = tl.load(x_ptr + token * x_stride + channels_C)
                b_N = tl.load(b_ptr + token * b_stride + rows_N, mask=ok_N, other=0.0)
                c_N = tl.load(c_ptr + token * c_stride + rows_N, mask=ok_N, other=0.0).to(tl.float32)
                state_NC = _stepped(state_NC, rates_NC, _softplus(raw_C.to(tl.float32)), x_C.to(tl.float32), b_N.to(tl.float32))
                out_C = tl.sum(state_NC * c_N[:, None], axis=0)
                tl.store(out_ptr + token * CHANNELS + channels_C, out_C.to(out_ptr.dtype.element_ty))
                if position >= end:
                    entry = position % RING
                    tl.store(new_inputs + entry * 2 * C, raw_C)
                    tl.store(new_inputs + entry * 2 * C + C, x_C)
                    tl.store(new_keys + entry * N, b_N, mask=ok_N)
                if position + 1 == new_later:
                    tl.store(new_states + N * C, state_NC.to(states_ptr.dtype.element_ty), mask=ok_NC)
            tl.store(new_positions, end.to(tl.float32))
            tl.store(new_positions + 1, new_later.to(tl.float32))


@triton.jit
def _chunk_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, out_ptr, local_ptr, total_ptr, start_loc_ptr, seq_lens_ptr,
    x_stride, dt_stride, b_stride, c_stride,
    CHANNELS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, RING: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    GIVES_OUTPUT: tl.constexpr,
):  # fmt: skip
    """A chunk's state from zeros and its sum of dt, or its outputs from the state that it begins with."""
    unit, number, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens_ptr + seq)
    start = tl.load(start_loc_ptr + seq)
    computed = length - (tl.load(start_loc_ptr + seq + 1) - start)
    end = tl.maximum(computed, length - (RING - BLOCK - 1)) // BLOCK * BLOCK
    first, last = number * CHUNK, tl.minimum(end - computed, number * CHUNK + CHUNK)
    if (length > 0) & (first < last):
        rows_N, cols_C = tl.arange(0, BLOCK_N), tl.arange(0, C)
        ok_N = rows_N < N
        ok_NC = ok_N[:, None] & (cols_C >= 0)[None, :]
        channels_C = unit * C + cols_C
        rates_NC = tl.load(a_ptr + channels_C[None, :] * N + rows_N[:, None], mask=ok_NC, other=0.0) * LOG2_E
        at = ((start // CHUNK + seq + number) * (CHANNELS // C) + unit).to(tl.int64)
        local = local_ptr + at * N * C + rows_N[:, None] * C + cols_C[None, :]
        state_NC, total_C = tl.zeros((BLOCK_N, C), tl.float32), tl.zeros((C,), tl.float32)
        if GIVES_OUTPUT:
            state_NC = tl.load(local, mask=ok_NC, other=0.0)
        for offset in range(first, last):
            token = (start + offset).to(tl.int64)
            dt_C = _softplus(tl.load(dt_ptr + token * dt_stride + channels_C).to(tl.float32))
            x_C = tl.load(x_ptr + token * x_stride + channels_C).to(tl.float32)
            b_N = tl.load(b_ptr + token * b_stride + rows_N, mask=ok_N, other=0.0).to(tl.float32)
            state_NC = _stepped(state_NC, rates_NC, dt_C, x_C, b_N)
            if GIVES_OUTPUT:
                c_N = tl.load(c_ptr + token * c_stride + rows_N, mask=ok_N, other=0.0).to(tl.float32)
                out_C = tl.sum(state_NC * c_N[:, None], axis=0)
                tl.store(out_ptr + token * CHANNELS + channels_C, out_C.to(out_ptr.dtype.element_ty))
            else:
                total_C += dt_C
        if not GIVES_OUTPUT:
            tl.store(local, state_NC, mask=ok_NC)
            tl.store(total_ptr + at * C + cols_C, total_C)


def selective_scan(
    x_TI: torch.Tensor,
    dt_TI: torch.Tensor,
    a_IN: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    state: Sequence[StatePart],
    metadata: SlotMetadata,
    out_TI: torch.Tensor,
) -> None:
    """As `cas::selective_scan`, into `out_TI`, which is contiguous. Tokens of padding are not written."""
    states, inputs, keys, positions = (tensor for tensor, _ in state)
    state_size, block = states.shape[3:]
    num_tokens, num_channels = x_TI.shape
    num_seqs, units = len(metadata.seq_lens), num_channels // block
    chunk = max(_CHUNK, next_power_of_2(cdiv(num_tokens, _MAX_CHUNKS)))
    is_short = metadata.max_query_len <= ROLLBACK_TOKENS + 1
    slots = 0 if is_short else num_tokens // chunk + num_seqs + 1
    local, total = (torch.empty(slots, units, size, block, device=x_TI.device) for size in (state_size, 1))
    rows = x_TI, dt_TI, a_IN, b_TN, c_TN, out_TI, local, total
    row_strides = tuple(one.stride(0) for one in (x_TI, dt_TI, b_TN, c_TN))
    sizes = {"CHANNELS": num_channels, "C": block, "N": state_size, "RING": inputs.shape[2], "CHUNK": chunk}
    sizes["BLOCK_N"] = max(2, next_power_of_2(state_size))

    def scan(part: tl.constexpr) -> None:
        launch(
            _scan_kernel,
            (units, num_seqs),
            *rows,
            *(tensor for pair in state for tensor in pair),
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.read_pages,
            metadata.write_pages,
            *row_strides,
            *(tensor.stride(0) for tensor, _ in state),
            metadata.read_pages.stride(0),
            metadata.write_pages.stride(0),
            **sizes,
            STATE_UNITS=states.shape[1],
            INPUT_UNITS=inputs.shape[1],
            KEY_UNITS=keys.shape[1],
            POSITION_UNITS=positions.shape[1],
            PART=part.value,
            num_warps=4,
        )

    def chunks(*, give_output: bool) -> None:
        grid = units, cdiv(metadata.max_query_len, chunk), num_seqs
        lengths = metadata.query_start_loc, metadata.seq_lens
        launch(_chunk_kernel, grid, *rows, *lengths, *row_strides, **sizes, GIVES_OUTPUT=give_output, num_warps=4)

    if is_short:
        scan(ALL)
        return
    chunks(give_output=False)
    scan(TO_CHECKPOINT)
    chunks(give_output=True)
    scan(FROM_CHECKPOINT)

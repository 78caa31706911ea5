"""Tokens of groups brought to all ranks, and their sums brought back, over symmetric memory in one shot.

A rank writes its rows into its own buffer, signals the other ranks, and waits for their signals. Then it reads from all buffers.
`gather_rows` reads all rows. `scatter_rows` reads every rank's part of this rank's rows, and adds the parts in float32 in the order of
ranks, with one rounding. Slots, flags and counts of launches are used as by the one-shot all-reduce; `triton_allreduce.py` says why no
barrier is needed at the end.

Shape legend: T rows of each rank, D features, W words of 4 bytes in a row, N ranks, P = N · T rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.collectives.symmetric_memory import SymmetricMemory
from compile_and_serve.custom_ops.collectives.triton_allreduce import resident, row_of, signal_ranks, wait_for_rank
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import launch_options, let_next_start, next_power_of_2, supports_pdl, wait_for_previous


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for any number of rows
def _gather_kernel(
    x_ptr, out_ptr, addresses_ptr, launches_ptr, num_rows, num_words, row_bytes, program_bytes, flags_offset,
    RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols_W = tl.arange(0, BLOCK)
    ok_W = cols_W < num_words
    peer_N = tl.arange(0, PADDED_SIZE)
    ok_NW = (peer_N < SIZE)[:, None] & ok_W[None, :]
    let_next_start(PDL)
    wait_for_previous(PDL)
    launch = tl.load(launches_ptr + program) + 1
    mine = tl.load(addresses_ptr + RANK)
    address_N = tl.load(addresses_ptr + peer_N, mask=peer_N < SIZE, other=0)
    first_row = program.to(tl.int64)
    first_slot = ((launch & 1) * NUM_PROGRAMS + program).to(tl.int64) * program_bytes
    flags = flags_offset + program.to(tl.int64) * SIZE * 4

    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        x_W = tl.load(x_ptr + row * num_words + cols_W, mask=ok_W, other=0)
        tl.store(row_of(mine + slot, x_ptr) + cols_W, x_W, mask=ok_W)
        row += num_programs
        slot += row_bytes
    signal_ranks(addresses_ptr, flags, launch, RANK, SIZE, PADDED_SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            wait_for_rank(peer, mine, flags, launch)

    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        # All ranks' rows at once, so that the loads overlap. Volatile: not from a cache line of an earlier launch.
        theirs_N = tl.multiple_of((address_N + slot).to(x_ptr.dtype), [16])
        x_NW = tl.load(theirs_N[:, None] + cols_W[None, :], mask=ok_NW, other=0, volatile=True)
        out_N = (peer_N * num_rows + row) * num_words
        tl.store(out_ptr + out_N[:, None] + cols_W[None, :], x_NW, mask=ok_NW)
        row += num_programs
        slot += row_bytes
    tl.store(launches_ptr + program, launch)


@triton.jit(do_not_specialize=["num_rows"])
def _scatter_kernel(
    x_ptr, out_ptr, addresses_ptr, launches_ptr, num_rows, num_features, row_bytes, program_bytes, flags_offset,
    RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols_D = tl.arange(0, BLOCK)
    ok_D = cols_D < num_features
    let_next_start(PDL)
    wait_for_previous(PDL)
    launch = tl.load(launches_ptr + program) + 1
    mine = tl.load(addresses_ptr + RANK)
    first_row = program.to(tl.int64)
    first_slot = ((launch & 1) * NUM_PROGRAMS + program).to(tl.int64) * program_bytes
    flags = flags_offset + program.to(tl.int64) * SIZE * 4

    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        for owner in tl.static_range(SIZE):
            if owner != RANK:
                x_D = tl.load(x_ptr + (owner * num_rows + row) * num_features + cols_D, mask=ok_D, other=0.0)
                tl.store(row_of(mine + slot + owner * row_bytes, x_ptr) + cols_D, x_D, mask=ok_D)
        row += num_programs
        slot += SIZE * row_bytes
    signal_ranks(addresses_ptr, flags, launch, RANK, SIZE, PADDED_SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            wait_for_rank(peer, mine, flags, launch)

    row, slot = first_row, first_slot + RANK * row_bytes
    for _ in range(program, num_rows, num_programs):
        total_D = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                x_D = tl.load(x_ptr + (RANK * num_rows + row) * num_features + cols_D, mask=ok_D, other=0.0)
            else:
                theirs = row_of(tl.load(addresses_ptr + peer) + slot, x_ptr)
                x_D = tl.load(theirs + cols_D, mask=ok_D, other=0.0, volatile=True)
            total_D += x_D.to(tl.float32)
        tl.store(out_ptr + row * num_features + cols_D, total_D.to(out_ptr.dtype.element_ty), mask=ok_D)
        row += num_programs
        slot += SIZE * row_bytes
    tl.store(launches_ptr + program, launch)


def fits(num_rows: int, row_bytes: int, memory: SymmetricMemory) -> bool:
    """Whether the buffers hold so many rows of each rank, which have to be of whole words."""
    layout = memory.layout
    slots = layout.size * -(-num_rows // layout.num_programs)
    return num_rows > 0 and row_bytes % 4 == 0 and row_bytes <= layout.row_bytes and slots <= layout.rows_per_program


def gather_rows(x_TD: torch.Tensor, memory: SymmetricMemory) -> torch.Tensor:
    """As `cas::gather_tokens`. The rows have to fit. → [P, D]"""
    x_TD = x_TD.contiguous()
    out_PD = x_TD.new_empty(memory.layout.size * x_TD.shape[0], *x_TD.shape[1:])
    x_TW = x_TD.view(torch.int32)
    _launch(_gather_kernel, x_TW, out_PD.view(torch.int32), x_TD.shape[0], x_TW.shape[1], memory)
    return out_PD


def scatter_rows(x_PD: torch.Tensor, memory: SymmetricMemory) -> torch.Tensor:
    """As `cas::scatter_tokens`. The rows have to fit. → [T, D]"""
    num_rows = x_PD.shape[0] // memory.layout.size
    out_TD = x_PD.new_empty(num_rows, *x_PD.shape[1:])
    _launch(_scatter_kernel, x_PD.contiguous(), out_TD, num_rows, x_PD.shape[1], memory)
    return out_TD


def _launch(kernel: Any, x: torch.Tensor, out: torch.Tensor, num_rows: int, width: int, memory: SymmetricMemory) -> None:
    layout, block, pdl = memory.layout, next_power_of_2(width), supports_pdl(x.device)
    launch(
        kernel, (min(num_rows, layout.num_programs),),
        x, out, memory.addresses_N, memory.launches, num_rows, width, layout.row_bytes, layout.rows_per_program * layout.row_bytes,
        layout.flags_offset, RANK=memory.rank, SIZE=layout.size, PADDED_SIZE=next_power_of_2(layout.size),
        NUM_PROGRAMS=layout.num_programs, BLOCK=block, PDL=pdl, **launch_options(pdl), **resident(block, x.device),
    )  # fmt: skip

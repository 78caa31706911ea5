"""Two shots by stores: the all-reduce over peer memory for many rows, in which ranks write to each other and read only what is their own.

A load from another GPU's memory asks in one direction, is answered in the other, and is waited for. A store is sent and forgotten. So here
a row goes to its owner, the rank that sums it, and its sum to all other ranks, as stores alone; with the flags behind them, two trips.

A program's rows go to the ranks in turn: `SIZE` of them, one for every owner, are a round, and a few rounds a chunk. In step k a program

1. sends its parts of chunk k, each to the row's owner;
2. waits until all others have told of their step k - 1: their parts of chunk k - 1 and their sums of chunk k - 2 are here;
3. sums its own rows of chunk k - 1, residual + x of rank 0 + x of rank 1 + …, and sends the sums;
4. norms all rows of chunk k - 2, from its own memory;
5. tells the others that it has done step k.

So a flag has a step's time for its trip, and rows of two chunks are on the link beside a third's norm. Steps are counted on from launch to
launch, as launches are, by each program for itself; a launch of C chunks tells C + 1 of them, in the last of its C + 2 nobody waits.

Who may write where. Program p of all ranks alone uses the places of program p. What a flag tells of is all that its program did before, and
all that was told to that program (release and acquire on the whole system, with the program's threads joined by a barrier): reads, too,
are over before what is written after the flag was seen. A rank that has ended a launch has seen all others in that launch.

Sums lie in the two places of each row that the other kernels use, too, taken in turn by launches. A sum, or whatever other kernels write
there, of launch e comes from a rank that has ended e - 1. So all ranks were at e - 1 and had ended e - 2, the last launch that read or
wrote the place; on the rank where it lies and on those that read it from there.

Parts have one place each, which no other kernel uses. One of launch e comes from a rank that has ended e - 1. If that was a launch of this
kernel, with C chunks, the rank has seen in its last step that every owner had done step C, and so had read all parts; if it was another
one, every owner was in it and had ended the last launch of this kernel before. Within a launch each place is written once and read by
its owner after.

Shape legend: T rows, D features, R rounds at once, N ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.collectives.symmetric_memory import SymmetricMemory
from compile_and_serve.custom_ops.collectives.triton_allreduce import (
    row_of,
    run_over_places,
    store_row,
    tell_others,
    wait_for,
)
from compile_and_serve.custom_ops.quantization import Rounded
from compile_and_serve.custom_ops.triton_common import let_next_start, wait_for_previous

# That the rows of a program are cut into. Each costs a flag, behind which all stores before it must have arrived.
MAX_CHUNKS = 8
WIDEST_PAIR = 4096  # features of which two rows at once fit into a program's registers


@triton.jit
def _send_parts(
    x_ptr, addresses_ptr, parts, first_round, end_round, num_mine, num_features, x_stride, row_bytes,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Our x of the rows of some rounds that others own, to each row's owner."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    round_R1, cols_1D = tl.arange(0, ROUNDS)[:, None], tl.arange(0, BLOCK)[None, :]
    row_values = row_bytes // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            place = tl.load(addresses_ptr + peer) + parts + ((RANK - peer + SIZE - 1) % SIZE) * row_bytes
            for start in range(first_round, end_round, ROUNDS):
                index_R1 = (start + round_R1) * SIZE + (peer + SIZE - program % SIZE) % SIZE
                ok_RD = (index_R1 < num_mine) & (start + round_R1 < end_round) & (cols_1D < num_features)
                row_R1 = program + index_R1.to(tl.int64) * num_programs
                x_RD = tl.load(x_ptr + row_R1 * x_stride + cols_1D, mask=ok_RD, other=0.0)
                theirs = row_of(place + start * ((SIZE - 1) * row_bytes), x_ptr)
                tl.store(theirs + round_R1 * ((SIZE - 1) * row_values) + cols_1D, x_RD, mask=ok_RD)


@triton.jit
def _send_sums(
    x_ptr, residual_ptr, addresses_ptr, parts, place, first_round, end_round, num_mine, num_features, x_stride,
    residual_stride, row_bytes, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Sums of the rows of some rounds that we own, in float32 in the order of ranks, rounded, to every rank, us too."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    round_R1, cols_1D = tl.arange(0, ROUNDS)[:, None], tl.arange(0, BLOCK)[None, :]
    row_values = row_bytes // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    addresses = ()  # in the order of ranks; a load between the stores would wait for its answer
    for peer in tl.static_range(SIZE):
        addresses += (tl.load(addresses_ptr + peer),)  # type: ignore[assignment]
    for start in range(first_round, end_round, ROUNDS):
        first_index = start * SIZE + (RANK + SIZE - program % SIZE) % SIZE
        index_R1 = first_index + round_R1 * SIZE
        ok_RD = (index_R1 < num_mine) & (start + round_R1 < end_round) & (cols_1D < num_features)
        row_R1 = program + index_R1.to(tl.int64) * num_programs
        total_RD = tl.load(residual_ptr + row_R1 * residual_stride + cols_1D, mask=ok_RD, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                x_RD = tl.load(x_ptr + row_R1 * x_stride + cols_1D, mask=ok_RD, other=0.0)
            else:
                slot = start * (SIZE - 1) + (peer - RANK + SIZE - 1) % SIZE
                part = (
                    row_of(addresses[RANK] + parts + slot * row_bytes, x_ptr)
                    + round_R1 * ((SIZE - 1) * row_values)
                    + cols_1D
                )
                x_RD = tl.load(part, mask=ok_RD, other=0.0, cache_modifier=".cg")  # written by another GPU
            total_RD += x_RD.to(tl.float32)
        rounded_RD = total_RD.to(x_ptr.dtype.element_ty)
        for peer in tl.static_range(SIZE):
            at = row_of(addresses[peer] + place + first_index * row_bytes, x_ptr)
            tl.store(at + round_R1 * (SIZE * row_values) + cols_1D, rounded_RD, mask=ok_RD)


@triton.jit
def _norm_rows(
    sums, first_index, end_index, weight_D, x_ptr, sum_ptr, out_ptr, quantized_ptr, scale_ptr, num_features, eps,
    row_bytes, QUANTIZE: tl.constexpr, LARGEST_VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norm of rows whose sums lie here, one behind the other from `sums` on; each is on its way while the one before is normed."""
    cols_D = tl.arange(0, BLOCK)
    ok_D = cols_D < num_features
    num_programs = tl.num_programs(0).to(tl.int64)
    row = tl.program_id(0) + first_index * num_programs
    last_row = row + (end_index - first_index - 1) * num_programs
    at = sums + first_index * row_bytes
    rounded_D = tl.load(row_of(at, x_ptr) + cols_D, mask=ok_D, other=0.0, cache_modifier=".cg")
    for _ in range(first_index, end_index):
        at += row_bytes
        ok_next_D = cols_D < tl.where(row < last_row, num_features, 0)
        next_D = tl.load(row_of(at, x_ptr) + cols_D, mask=ok_next_D, other=0.0, cache_modifier=".cg")
        store_row(
            rounded_D, row, cols_D, ok_D, weight_D, sum_ptr, out_ptr, quantized_ptr, scale_ptr, num_features, eps,
            QUANTIZE, LARGEST_VALUE, BLOCK,
        )  # fmt: skip
        row += num_programs
        rounded_D = next_D


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all of them
def _two_shot_stores_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, addresses_ptr, launches_ptr, num_rows, num_features, x_stride,
    residual_stride, eps, row_bytes, program_bytes, flags_offset, quantized_ptr, scale_ptr, steps_ptr, parts_offset,
    program_parts_bytes,
    RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr, MAX_CHUNKS: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST_VALUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols_D = tl.arange(0, BLOCK)
    weight_D = tl.load(weight_ptr + cols_D, mask=cols_D < num_features, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    launch = tl.load(launches_ptr + program) + 1
    steps_before = tl.load(steps_ptr + program)
    mine = tl.load(addresses_ptr + RANK)
    row_bytes = row_bytes.to(tl.int64)  # what is computed with it leads to addresses
    place = ((launch & 1) * NUM_PROGRAMS + program).to(tl.int64) * program_bytes
    parts = parts_offset + program.to(tl.int64) * program_parts_bytes
    flags = flags_offset + program.to(tl.int64) * SIZE * 4
    step_flags = flags + 2 * NUM_PROGRAMS * SIZE * 4

    # All of these are equal on all ranks.
    num_mine = (num_rows - program + num_programs - 1) // num_programs
    num_rounds = (num_mine + SIZE - 1) // SIZE
    chunk = (num_rounds + MAX_CHUNKS * ROUNDS - 1) // (MAX_CHUNKS * ROUNDS) * ROUNDS
    num_chunks = (num_rounds + chunk - 1) // chunk
    for step in range(num_chunks + 2):
        if step < num_chunks:
            _send_parts(
                x_ptr, addresses_ptr, parts, step * chunk, tl.minimum((step + 1) * chunk, num_rounds), num_mine, num_features,
                x_stride, row_bytes, RANK, SIZE, BLOCK, ROUNDS,
            )  # fmt: skip
        if step > 0:
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    wait_for(peer, mine, step_flags, steps_before + step)
            if step <= num_chunks:
                _send_sums(
                    x_ptr, residual_ptr, addresses_ptr, parts, place, (step - 1) * chunk, tl.minimum(step * chunk, num_rounds),
                    num_mine, num_features, x_stride, residual_stride, row_bytes, RANK, SIZE, BLOCK, ROUNDS,
                )  # fmt: skip
        if step > 1:
            _norm_rows(
                mine + place, (step - 2) * chunk * SIZE, tl.minimum((step - 1) * chunk * SIZE, num_mine), weight_D, x_ptr,
                sum_ptr, out_ptr, quantized_ptr, scale_ptr, num_features, eps, row_bytes, QUANTIZE, LARGEST_VALUE, BLOCK,
            )  # fmt: skip
        if step <= num_chunks:
            tell_others(addresses_ptr, step_flags, steps_before + step + 1, RANK, SIZE, PADDED_SIZE)
        if (
            step == 0
        ):  # for the other kernels, whose waiting must not fall behind by more launches than an int32 can count
            tell_others(addresses_ptr, flags, launch, RANK, SIZE, PADDED_SIZE)
    tl.store(launches_ptr + program, launch)
    tl.store(steps_ptr + program, steps_before + num_chunks + 1)


def two_shot_stores_allreduce_add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, memory: SymmetricMemory,
    quantized: Rounded | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `cas::allreduce_add_rms_norm`, for a message that `triton_allreduce.takes` takes, in memory with room for parts. → s, y, each
    [T, D], the same bits as there

    quantized: where `quantize_rows` of y is written, too: of 8 bits [T, D], float32 [T, 1].
    """
    layout = memory.layout
    assert layout.has_parts, "the ranks' memory has no room for parts"
    return run_over_places(
        _two_shot_stores_kernel, x_TD, residual_TD, norm_weight_D, eps, memory, quantized,
        memory.steps, layout.parts_offset, layout.program_parts_bytes,
        ROUNDS=2 if x_TD.shape[1] <= WIDEST_PAIR else 1, MAX_CHUNKS=MAX_CHUNKS,
    )  # fmt: skip

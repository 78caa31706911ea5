"""Two shots by stores: an all-reduce over symmetric memory for many rows. Ranks write to each other and read only their own memory.

A load from another GPU's memory is a request, an answer, and a wait. A store needs no answer. So here a row is stored to its owner, the
rank that sums it, and the sum is stored to all other ranks. With the flags behind the stores, that is two trips.

The ranks take turns in owning a program's rows. SIZE rows, one for every owner, are a round, and a few rounds are a chunk. In step k a
program

1. sends its parts of chunk k to the rows' owners;
2. waits until all other ranks have signaled step k - 1: their parts of chunk k - 1 and their sums of chunk k - 2 have arrived;
3. sums its own rows of chunk k - 1, residual + x of rank 0 + x of rank 1 + …, and sends the sums;
4. normalizes all rows of chunk k - 2 from its own memory;
5. signals the other ranks that it has finished step k.

So a flag has the time of a step for its trip, and the rows of two chunks are on the link while a third chunk is normalized. Each program
counts its steps over all launches, as it counts its launches. A launch of C chunks has C + 2 steps and signals C + 1 of them; no rank
waits for the last one.

Why no rank overwrites what another still needs: only program p of the ranks uses the slots of program p. A flag covers everything that its
program did before, and everything that had been signaled to that program (release and acquire on the whole system, with a barrier over
the program's threads). That includes reads: they are over before anything is written after the flag. A rank that has finished a launch has
seen all other ranks in that launch.

Sums use the two slots of each row, which the other kernels use as well and which launches take in turn. A write of launch e, by this or
another kernel, comes from a rank that has finished launch e - 1. So all ranks had begun e - 1 and finished e - 2, the last launch that
read or wrote the slot, on any rank.

Parts have one slot each, which no other kernel uses. A part of launch e comes from a rank that has finished launch e - 1. If that was a
launch of this kernel with C chunks, the rank saw in its last step that every owner had finished step C, and so had read all parts. If it
was a launch of another kernel, every owner was in it and had finished the last launch of this kernel. Within a launch, each slot is
written once and then read by its owner.

Shape legend: T rows, D features, R rounds at a time, N ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.collectives.symmetric_memory import SymmetricMemory
from compile_and_serve.custom_ops.collectives.triton_allreduce import launch_with_slots, row_of, signal_ranks, store_row, wait_for_rank
from compile_and_serve.custom_ops.quantization import Quantized
from compile_and_serve.custom_ops.triton_common import let_next_start, wait_for_previous

# Chunks of a program's rows, at most. Each costs a flag, which has to wait for all stores before it.
MAX_CHUNKS = 8
WIDEST_PAIR = 4096  # features of two rows that fit into a program's registers together


@triton.jit
def _send_parts(
    x_ptr,
    addresses_ptr,
    parts,
    first_round,
    end_round,
    num_mine,
    num_features,
    x_stride,
    row_bytes,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Store this rank's x of some rounds to the owners of the rows."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    round_R1, cols_1D = tl.arange(0, ROUNDS)[:, None], tl.arange(0, BLOCK)[None, :]
    row_values = row_bytes // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            slot = tl.load(addresses_ptr + peer) + parts + ((RANK - peer + SIZE - 1) % SIZE) * row_bytes
            for start in range(first_round, end_round, ROUNDS):
                index_R1 = (start + round_R1) * SIZE + (peer + SIZE - program % SIZE) % SIZE
                ok_RD = (index_R1 < num_mine) & (start + round_R1 < end_round) & (cols_1D < num_features)
                row_R1 = program + index_R1.to(tl.int64) * num_programs
                x_RD = tl.load(x_ptr + row_R1 * x_stride + cols_1D, mask=ok_RD, other=0.0)
                theirs = row_of(slot + start * ((SIZE - 1) * row_bytes), x_ptr)
                tl.store(theirs + round_R1 * ((SIZE - 1) * row_values) + cols_1D, x_RD, mask=ok_RD)


@triton.jit
def _send_sums(
    x_ptr,
    residual_ptr,
    addresses_ptr,
    parts,
    slot,
    first_round,
    end_round,
    num_mine,
    num_features,
    x_stride,
    residual_stride,
    row_bytes,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Sum this rank's rows of some rounds in float32, in the order of ranks, and store the rounded sums to every rank."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    round_R1, cols_1D = tl.arange(0, ROUNDS)[:, None], tl.arange(0, BLOCK)[None, :]
    row_values = row_bytes // (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    addresses = ()  # loaded here, because a load between the stores would wait
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
                part_index = start * (SIZE - 1) + (peer - RANK + SIZE - 1) % SIZE
                part = row_of(addresses[RANK] + parts + part_index * row_bytes, x_ptr) + round_R1 * ((SIZE - 1) * row_values) + cols_1D
                x_RD = tl.load(part, mask=ok_RD, other=0.0, cache_modifier=".cg")  # written by another GPU
            total_RD += x_RD.to(tl.float32)
        rounded_RD = total_RD.to(x_ptr.dtype.element_ty)
        for peer in tl.static_range(SIZE):
            at = row_of(addresses[peer] + slot + first_index * row_bytes, x_ptr)
            tl.store(at + round_R1 * (SIZE * row_values) + cols_1D, rounded_RD, mask=ok_RD)


@triton.jit
def _norm_rows(
    sums,
    first_index,
    end_index,
    weight_D,
    x_ptr,
    sum_ptr,
    out_ptr,
    quantized_ptr,
    scale_ptr,
    num_features,
    eps,
    row_bytes,
    QUANTIZE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize rows whose sums are in this rank's memory from `sums` on. The next row loads while one is normalized."""
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
            rounded_D,
            row,
            cols_D,
            ok_D,
            weight_D,
            sum_ptr,
            out_ptr,
            quantized_ptr,
            scale_ptr,
            num_features,
            eps,
            QUANTIZE,
            LARGEST_VALUE,
            BLOCK,
        )
        row += num_programs
        rounded_D = next_D


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for any number of rows
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
    row_bytes = row_bytes.to(tl.int64)  # addresses are computed with it
    slot = ((launch & 1) * NUM_PROGRAMS + program).to(tl.int64) * program_bytes
    parts = parts_offset + program.to(tl.int64) * program_parts_bytes
    flags = flags_offset + program.to(tl.int64) * SIZE * 4
    step_flags = flags + 2 * NUM_PROGRAMS * SIZE * 4

    # These are equal on all ranks.
    num_mine = (num_rows - program + num_programs - 1) // num_programs
    num_rounds = (num_mine + SIZE - 1) // SIZE
    chunk = (num_rounds + MAX_CHUNKS * ROUNDS - 1) // (MAX_CHUNKS * ROUNDS) * ROUNDS
    num_chunks = (num_rounds + chunk - 1) // chunk
    for step in range(num_chunks + 2):
        if step < num_chunks:
            _send_parts(
                x_ptr,
                addresses_ptr,
                parts,
                step * chunk,
                tl.minimum((step + 1) * chunk, num_rounds),
                num_mine,
                num_features,
                x_stride,
                row_bytes,
                RANK,
                SIZE,
                BLOCK,
                ROUNDS,
            )
        if step > 0:
            for peer in tl.static_range(SIZE):
                if peer != RANK:
                    wait_for_rank(peer, mine, step_flags, steps_before + step)
            if step <= num_chunks:
                _send_sums(
                    x_ptr,
                    residual_ptr,
                    addresses_ptr,
                    parts,
                    slot,
                    (step - 1) * chunk,
                    tl.minimum(step * chunk, num_rounds),
                    num_mine,
                    num_features,
                    x_stride,
                    residual_stride,
                    row_bytes,
                    RANK,
                    SIZE,
                    BLOCK,
                    ROUNDS,
                )
        if step > 1:
            _norm_rows(
                mine + slot,
                (step - 2) * chunk * SIZE,
                tl.minimum((step - 1) * chunk * SIZE, num_mine),
                weight_D,
                x_ptr,
                sum_ptr,
                out_ptr,
                quantized_ptr,
                scale_ptr,
                num_features,
                eps,
                row_bytes,
                QUANTIZE,
                LARGEST_VALUE,
                BLOCK,
            )
        if step <= num_chunks:
            signal_ranks(addresses_ptr, step_flags, steps_before + step + 1, RANK, SIZE, PADDED_SIZE)
        if step == 0:  # for the other kernels, whose counts must not fall 2^31 launches behind
            signal_ranks(addresses_ptr, flags, launch, RANK, SIZE, PADDED_SIZE)
    tl.store(launches_ptr + program, launch)
    tl.store(steps_ptr + program, steps_before + num_chunks + 1)


def two_shot_stores_allreduce_add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    memory: SymmetricMemory,
    quantized: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cas::allreduce_add_rms_norm`, in two shots by stores. The message has to satisfy `triton_allreduce.takes`, and the memory has to
    have parts. → s, y, each [T, D], the same bits as with two shots

    quantized: receives `quantize_rows` of y: 8 bits [T, D], float32 [T, 1].
    """
    layout = memory.layout
    assert layout.has_parts, "the symmetric memory has no slots for parts"
    return launch_with_slots(
        _two_shot_stores_kernel,
        x_TD,
        residual_TD,
        norm_weight_D,
        eps,
        memory,
        quantized,
        memory.steps,
        layout.parts_offset,
        layout.program_parts_bytes,
        ROUNDS=2 if x_TD.shape[1] <= WIDEST_PAIR else 1,
        MAX_CHUNKS=MAX_CHUNKS,
    )

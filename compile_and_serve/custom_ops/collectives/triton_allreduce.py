"""All-reduce over symmetric memory with the residual and the norm in the same kernel.

    s = residual + Σ over ranks of x;  y = s / sqrt(mean(s²) + eps) · weight

Pushed: every rank writes its rows into all other ranks' buffers and waits until its own buffer has no empty value (-0.0; a -0.0 of x is
sent as 0.0). There are no flags: a rank waits for the data itself (Lamport's method). This suits a few rows per program. Each row has three
slots. A launch empties the slot of the launch before. Other ranks write to it in the launch after next, when they have received this
rank's row of the next launch.

One shot: every rank writes its rows into its own buffer, signals the other ranks, waits for their signals, and reads all rows. That is one
trip over the link for the flag and one for the rows. Each row crosses the link once for every pair of ranks.
Two shots: each row is summed by one rank, which signals the others when the sum is ready. That is two more trips, and each row crosses
the link twice for every rank. All of this is read from other ranks; in `triton_allreduce_stores.py` it is written to them.

Sums are in float32 in the order of ranks, with one rounding: every rank has the same bits.

Program p of a rank waits only for program p of the other ranks. It counts its own launches in memory, so that it works in a CUDA graph.
With one and two shots, each row has two slots, used in turn. A program in launch e has seen all ranks in launch e - 1, so all of them have
finished launch e - 2, whose slot it overwrites. So no barrier is needed at the end. All kernels that use these slots share one count of
launches. NVLink's multicast is not used.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.collectives.symmetric_memory import EMPTY, PROGRAMS_PER_SM, SymmetricMemory
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import Quantized
from compile_and_serve.custom_ops.triton_common import launch_options, let_next_start, next_power_of_2, supports_pdl, wait_for_previous
from compile_and_serve.custom_ops.triton_quantize import quantize_constants, store_quantized


@triton.jit
def signal_ranks(addresses_ptr, flags, count, RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Signal that what this program has written is complete: sets one flag on each other rank."""
    tl.debug_barrier()  # all threads have written before one thread signals
    peer_N = tl.arange(0, PADDED_SIZE)
    is_other_N = (peer_N < SIZE) & (peer_N != RANK)
    theirs_N = tl.load(addresses_ptr + peer_N, mask=is_other_N, other=0)
    flag_N = (theirs_N + flags + RANK * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag_N, tl.zeros_like(peer_N) + count, mask=is_other_N, sem="release", scope="sys")


@triton.jit
def wait_for_rank(peer, mine, flags, count):
    """Wait until a peer has signaled this count or a later one. Counts of two ranks differ by less than 2^31."""
    flag = (mine + flags + peer * 4).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count < 0:  # the sign of the difference, because counts wrap around
        pass
    tl.debug_barrier()


@triton.jit
def _wait_for_sums_of_rank(peer, mine, flags, launch):
    """As `wait_for_rank`, for a count that no peer can exceed and that a peer may have signaled more than 2^31 launches ago."""
    flag = (mine + flags + peer * 4).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != launch:
        pass
    tl.debug_barrier()


@triton.jit
def row_of(address, ptr):
    """A row in a rank's buffer, as a pointer of ptr's type."""
    return tl.multiple_of(address.to(ptr.dtype), 16)


@triton.jit
def _sum_of_ranks(addresses_ptr, slot, x_row_ptr, residual_row_ptr, cols_D, ok_D, RANK: tl.constexpr, SIZE: tl.constexpr):
    """residual + x of rank 0 + x of rank 1 + …, in float32. x is read from `slot` of each other rank's buffer; this rank's from x."""
    total_D = tl.load(residual_row_ptr + cols_D, mask=ok_D, other=0.0).to(tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            x_D = tl.load(x_row_ptr + cols_D, mask=ok_D, other=0.0)
        else:
            theirs = row_of(tl.load(addresses_ptr + peer) + slot, x_row_ptr)
            x_D = tl.load(theirs + cols_D, mask=ok_D, other=0.0, volatile=True)  # volatile: not from a cache line of an earlier launch
        total_D += x_D.to(tl.float32)
    return total_D


@triton.jit
def _norm(rounded_D, weight_D, num_features, eps):
    s_D = rounded_D.to(tl.float32)
    return s_D * (1.0 / tl.sqrt_rn(tl.sum(s_D * s_D) / num_features + eps)) * weight_D


@triton.jit
def store_row(
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
    QUANTIZE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a row of sums, its norm, and the norm quantized to 8 bits if QUANTIZE."""
    tl.store(sum_ptr + row * num_features + cols_D, rounded_D, mask=ok_D)
    y_D = _norm(rounded_D, weight_D, num_features, eps)
    tl.store(out_ptr + row * num_features + cols_D, y_D.to(out_ptr.dtype.element_ty), mask=ok_D)
    if QUANTIZE:
        y_D = y_D.to(out_ptr.dtype.element_ty).to(tl.float32)
        store_quantized(y_D, row, cols_D, ok_D, quantized_ptr, scale_ptr, None, num_features, False, LARGEST_VALUE, BLOCK, BLOCK)


@triton.jit
def _bits_to_send(row_ptr, cols_D, ok_D, EMPTY_BITS: tl.constexpr):
    x_D = tl.load(row_ptr + cols_D, mask=ok_D, other=0)
    return tl.where(x_D == EMPTY_BITS, 0, x_D).to(tl.int16)


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for any number of rows
def _pushed_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, addresses_ptr, turns_ptr, num_rows, num_features, x_stride,
    residual_stride, eps, pushed_offset, quantized_ptr, scale_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr, PUSHED_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr, ROW_VALUES: tl.constexpr, EMPTY_BITS: tl.constexpr, QUANTIZE: tl.constexpr, LARGEST_VALUE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols_D = tl.arange(0, BLOCK)
    ok_D = cols_D < num_features
    weight_D = tl.load(weight_ptr + cols_D, mask=ok_D, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    bits_ptr = x_ptr.to(tl.pointer_type(tl.int16))
    row_bytes: tl.constexpr = ROW_VALUES * 2
    program_bytes: tl.constexpr = PUSHED_ROWS * SIZE * row_bytes
    state = tl.load(turns_ptr + program)
    turn, num_before = state & 3, state >> 2
    mine = tl.load(addresses_ptr + RANK)
    first_row = program.to(tl.int64)
    first_slot = pushed_offset + (turn * NUM_PROGRAMS + first_row) * program_bytes
    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        x_D = _bits_to_send(bits_ptr + row * x_stride, cols_D, ok_D, EMPTY_BITS)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = row_of(tl.load(addresses_ptr + peer) + slot + RANK * row_bytes, bits_ptr)
                tl.store(theirs + cols_D, x_D, mask=ok_D)
        row += num_programs
        slot += SIZE * row_bytes
    # Empty the slot of the launch before: whole rows, because that launch may have had more features.
    col_R = tl.arange(0, ROW_BLOCK)
    slot = pushed_offset + ((turn + 2) % 3 * NUM_PROGRAMS + first_row) * program_bytes
    for _ in range(num_before):
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = row_of(mine + slot + peer * row_bytes, bits_ptr)
                tl.store(theirs + col_R, tl.full((ROW_BLOCK,), EMPTY_BITS, tl.int16), mask=col_R < ROW_VALUES)
        slot += SIZE * row_bytes

    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        total_D = tl.load(residual_ptr + row * residual_stride + cols_D, mask=ok_D, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            if peer == RANK:
                part_D = _bits_to_send(bits_ptr + row * x_stride, cols_D, ok_D, EMPTY_BITS)
            else:
                theirs = row_of(mine + slot + peer * row_bytes, bits_ptr)
                part_D = tl.load(theirs + cols_D, mask=ok_D, other=0, volatile=True)
                while tl.max((part_D == EMPTY_BITS).to(tl.int32)) > 0:
                    part_D = tl.load(theirs + cols_D, mask=ok_D, other=0, volatile=True)
            total_D += part_D.to(x_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        rounded_D = total_D.to(sum_ptr.dtype.element_ty)
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
        slot += SIZE * row_bytes
    num_now = (num_rows - program + num_programs - 1) // num_programs
    tl.store(turns_ptr + program, (turn + 1) % 3 + num_now * 4)


@triton.jit(do_not_specialize=["num_rows"])
def _one_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, addresses_ptr, launches_ptr, num_rows, num_features, x_stride,
    residual_stride, eps, row_bytes, program_bytes, flags_offset, quantized_ptr, scale_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr, LARGEST_VALUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols_D = tl.arange(0, BLOCK)
    ok_D = cols_D < num_features
    weight_D = tl.load(weight_ptr + cols_D, mask=ok_D, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    launch = tl.load(launches_ptr + program) + 1
    mine = tl.load(addresses_ptr + RANK)
    first_row = program.to(tl.int64)
    first_slot = ((launch & 1) * NUM_PROGRAMS + program).to(tl.int64) * program_bytes
    flags = flags_offset + program.to(tl.int64) * SIZE * 4

    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        x_D = tl.load(x_ptr + row * x_stride + cols_D, mask=ok_D, other=0.0)
        tl.store(row_of(mine + slot, x_ptr) + cols_D, x_D, mask=ok_D)
        row += num_programs
        slot += row_bytes
    signal_ranks(addresses_ptr, flags, launch, RANK, SIZE, PADDED_SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            wait_for_rank(peer, mine, flags, launch)

    row, slot = first_row, first_slot
    for _ in range(program, num_rows, num_programs):
        total_D = _sum_of_ranks(addresses_ptr, slot, x_ptr + row * x_stride, residual_ptr + row * residual_stride, cols_D, ok_D, RANK, SIZE)
        rounded_D = total_D.to(sum_ptr.dtype.element_ty)
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
        slot += row_bytes
    tl.store(launches_ptr + program, launch)


@triton.jit(do_not_specialize=["num_rows"])
def _two_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, addresses_ptr, launches_ptr, num_rows, num_features, x_stride,
    residual_stride, eps, row_bytes, program_bytes, flags_offset, quantized_ptr, scale_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr, LARGEST_VALUE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    cols_D = tl.arange(0, BLOCK)
    ok_D = cols_D < num_features
    weight_D = tl.load(weight_ptr + cols_D, mask=ok_D, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    launch = tl.load(launches_ptr + program) + 1
    mine = tl.load(addresses_ptr + RANK)
    first_row = program.to(tl.int64)
    first_slot = ((launch & 1) * NUM_PROGRAMS + program).to(tl.int64) * program_bytes
    flags = flags_offset + program.to(tl.int64) * SIZE * 4
    sum_flags = flags + NUM_PROGRAMS * SIZE * 4

    # The ranks take turns in summing a program's rows; each program begins with another rank.
    row, slot, owner = first_row, first_slot, program % SIZE
    for _ in range(program, num_rows, num_programs):
        if owner != RANK:
            x_D = tl.load(x_ptr + row * x_stride + cols_D, mask=ok_D, other=0.0)
            tl.store(row_of(mine + slot, x_ptr) + cols_D, x_D, mask=ok_D)
        row += num_programs
        slot += row_bytes
        owner = (owner + 1) % SIZE
    signal_ranks(addresses_ptr, flags, launch, RANK, SIZE, PADDED_SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            wait_for_rank(peer, mine, flags, launch)

    # The sum of a row goes into its owner's slot for the owner's own part, which no other rank reads.
    row, slot, owner = first_row, first_slot, program % SIZE
    for _ in range(program, num_rows, num_programs):
        if owner == RANK:
            x_row, residual_row = x_ptr + row * x_stride, residual_ptr + row * residual_stride
            total_D = _sum_of_ranks(addresses_ptr, slot, x_row, residual_row, cols_D, ok_D, RANK, SIZE)
            tl.store(row_of(mine + slot, x_ptr) + cols_D, total_D.to(sum_ptr.dtype.element_ty), mask=ok_D)
        row += num_programs
        slot += row_bytes
        owner = (owner + 1) % SIZE
    signal_ranks(addresses_ptr, sum_flags, launch, RANK, SIZE, PADDED_SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            _wait_for_sums_of_rank(peer, mine, sum_flags, launch)

    # A rank reads its own sums back, too: the same code gives all ranks the same bits of the norm.
    row, slot, owner = first_row, first_slot, program % SIZE
    for _ in range(program, num_rows, num_programs):
        theirs = row_of(tl.load(addresses_ptr + owner) + slot, x_ptr)
        rounded_D = tl.load(theirs + cols_D, mask=ok_D, other=0.0, volatile=True)
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
        slot += row_bytes
        owner = (owner + 1) % SIZE
    tl.store(launches_ptr + program, launch)


def takes(x_TD: torch.Tensor, memory: SymmetricMemory) -> bool:
    """Whether the buffers hold a message."""
    return x_TD.shape[0] <= memory.layout.max_rows and x_TD.shape[1] * x_TD.itemsize <= memory.layout.row_bytes


def takes_pushed(x_TD: torch.Tensor, memory: SymmetricMemory) -> bool:
    """Whether a message can be pushed: a few rows per program, of 16-bit values."""
    return takes(x_TD, memory) and x_TD.shape[0] <= memory.layout.max_pushed_rows and x_TD.itemsize == 2


def resident(block: int, device: torch.device) -> dict[str, int]:
    """Warps of a program over `block` features, and a limit of registers with which all programs are resident at once."""
    warps = max(1, min(16, block // 512))
    limit = {"maxnreg": min(255, 65536 // (PROGRAMS_PER_SM * 32 * warps))} if platform_of(device).runs_triton_kernels else {}
    return {"num_warps": warps} | limit


def pushed_allreduce_add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    memory: SymmetricMemory,
    quantized: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cas::allreduce_add_rms_norm`, pushed. The message has to satisfy `takes_pushed`. → s, y, each [T, D]

    quantized: receives `quantize_rows` of y: 8 bits [T, D], float32 [T, 1].
    """
    num_rows, num_features = x_TD.shape
    layout = memory.layout
    assert takes_pushed(x_TD, memory), f"{list(x_TD.shape)} of {x_TD.dtype} cannot be pushed in {layout}"
    assert x_TD.stride(1) == 1 and residual_TD.stride(1) == 1, "features must be contiguous"  # noqa: PT018
    total_TD, out_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    if not num_rows:
        return total_TD, out_TD
    block, pdl = next_power_of_2(num_features), supports_pdl(x_TD.device)
    row_values = layout.row_bytes // 2
    launch(
        _pushed_kernel, (min(num_rows, layout.num_programs),),
        x_TD, residual_TD, norm_weight_D, total_TD, out_TD, memory.addresses_N, memory.turns, num_rows, num_features,
        x_TD.stride(0), residual_TD.stride(0), eps, layout.pushed_offset, *(quantized or (None, None)), RANK=memory.rank, SIZE=layout.size,
        NUM_PROGRAMS=layout.num_programs, PUSHED_ROWS=layout.pushed_rows, BLOCK=block,
        ROW_BLOCK=next_power_of_2(row_values), ROW_VALUES=row_values, EMPTY_BITS=EMPTY, PDL=pdl,
        **quantize_constants(quantized), **launch_options(pdl), **resident(block, x_TD.device),
    )  # fmt: skip
    return total_TD, out_TD


def one_shot_allreduce_add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    memory: SymmetricMemory,
    quantized: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cas::allreduce_add_rms_norm`, in one shot. The message has to satisfy `takes`. → s, y, each [T, D]"""
    return launch_with_slots(_one_shot_kernel, x_TD, residual_TD, norm_weight_D, eps, memory, quantized)


def two_shot_allreduce_add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    memory: SymmetricMemory,
    quantized: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cas::allreduce_add_rms_norm`, in two shots. The message has to satisfy `takes`. → s, y, each [T, D]"""
    return launch_with_slots(_two_shot_kernel, x_TD, residual_TD, norm_weight_D, eps, memory, quantized)


def launch_with_slots(
    kernel: triton.JITFunction,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    memory: SymmetricMemory,
    quantized: Quantized | None,
    *more: Any,
    **constants: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a kernel with two slots per row. more, constants: its arguments beyond those of the kernels here. → s, y, each [T, D]"""
    num_rows, num_features = x_TD.shape
    layout = memory.layout
    assert takes(x_TD, memory), f"{layout} does not hold a message of {list(x_TD.shape)}"
    assert x_TD.stride(1) == 1 and residual_TD.stride(1) == 1, "features must be contiguous"  # noqa: PT018
    total_TD, out_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    if not num_rows:
        return total_TD, out_TD
    block, pdl = next_power_of_2(num_features), supports_pdl(x_TD.device)
    launch(
        kernel, (min(num_rows, layout.num_programs),),
        x_TD, residual_TD, norm_weight_D, total_TD, out_TD, memory.addresses_N, memory.launches, num_rows, num_features,
        x_TD.stride(0), residual_TD.stride(0), eps, layout.row_bytes, layout.rows_per_program * layout.row_bytes,
        layout.flags_offset, *(quantized or (None, None)), *more,
        RANK=memory.rank, SIZE=layout.size, PADDED_SIZE=next_power_of_2(layout.size), NUM_PROGRAMS=layout.num_programs, BLOCK=block,
        PDL=pdl, **constants, **quantize_constants(quantized),
        **launch_options(pdl), **resident(block, x_TD.device),
    )  # fmt: skip
    return total_TD, out_TD

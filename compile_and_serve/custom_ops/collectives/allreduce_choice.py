"""Which kernel of a fused all-reduce runs, by the number of rows. All ranks measure together once; the tuner's store keeps the times.

Rank 0's store decides what is known. Where nothing is, all ranks measure at the same time, and a kernel's time is that of its slowest
rank. So all ranks choose the same kernels, as they must: each kernel waits for the other ranks in its own way.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.collectives.collectives import RankGroup, all_reduce, rank_group
from compile_and_serve.custom_ops.collectives.symmetric_memory import SymmetricMemory, layout_for, map_symmetric_memory
from compile_and_serve.custom_ops.mesh import TENSOR, Axis
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import TimedEvent
from compile_and_serve.custom_ops.quantization import Quantized
from compile_and_serve.custom_ops.tuning.timer import call_seconds
from compile_and_serve.custom_ops.tuning.tuner import Measurement, Problem, Tuner, tuner_of

log = logging.getLogger(__name__)

NCCL, PUSHED, ONE_SHOT, TWO_SHOT, TWO_SHOT_STORES = "nccl", "pushed", "one_shot", "two_shot", "two_shot_stores"
ALL_KERNELS = (NCCL, PUSHED, ONE_SHOT, TWO_SHOT, TWO_SHOT_STORES)
# Rows that are measured, up to what the memory holds.
SIZES = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
EPS = 1e-6
REPEATS, ROUNDS = 21, 5
# Factors of x, in turn: a kernel that reads an earlier message from one of its slots gets a wrong sum.
MESSAGES = (1.0, -1.0, 0.5)
MAX_SECONDS = 60.0  # of one call; another rank may still compile the kernel

_IN_WORDS = {PUSHED: "pushed", ONE_SHOT: "in one shot", TWO_SHOT: "in two shots", TWO_SHOT_STORES: "in two shots by stores"}

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllreduceChoice:
    """The kernel for each number of rows: PUSHED up to pushed_rows, then ONE_SHOT up to one_shot_rows, then TWO_SHOT up to
    two_shot_rows, then TWO_SHOT_STORES up to two_shot_stores_rows, then NCCL.
    """

    pushed_rows: int = 0
    one_shot_rows: int = 0
    two_shot_rows: int = 0
    two_shot_stores_rows: int = 0

    def max_rows(self) -> dict[str, int]:
        """The largest number of rows of each kernel, in the order in which they are asked; NCCL has none."""
        return {
            PUSHED: self.pushed_rows,
            ONE_SHOT: self.one_shot_rows,
            TWO_SHOT: self.two_shot_rows,
            TWO_SHOT_STORES: self.two_shot_stores_rows,
        }

    def kernel(self, num_rows: int) -> str:
        """NCCL, PUSHED, ONE_SHOT, TWO_SHOT or TWO_SHOT_STORES."""
        return next((kernel for kernel, max_rows in self.max_rows().items() if num_rows <= max_rows), NCCL)

    def sentence(self) -> str:
        """For the log and the report."""
        parts, largest = [], 0
        for kernel, rows in self.max_rows().items():
            if rows > largest:
                parts.append(f"{_IN_WORDS[kernel]} up to {rows} rows")
                largest = rows
        return ", ".join([*parts, "then over NCCL" if parts else "over NCCL"])


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAllreduce:
    """How all-reduces before a norm run in a group: over symmetric memory, each kernel up to its number of rows.

    quantized_choice: for those that also quantize the norm.
    """

    group: RankGroup
    memory: SymmetricMemory
    choice: AllreduceChoice
    quantized_choice: AllreduceChoice


_fused: FusedAllreduce | None = None  # belongs to the process's tensor group: see `rank_group`


def use_symmetric_memory(memory: SymmetricMemory, choice: AllreduceChoice, quantized_choice: AllreduceChoice | None = None) -> None:
    """From now on, all-reduces before a norm run as `choice` says. Every rank calls it with the same choices.

    quantized_choice: for those that also quantize the norm; None: `choice`.
    """
    global _fused
    _fused = FusedAllreduce(group=rank_group(), memory=memory, choice=choice, quantized_choice=quantized_choice or choice)


def fused_allreduce(group: Axis = TENSOR) -> FusedAllreduce | None:
    """What `use_symmetric_memory` chose for this group; None: NCCL."""
    return _fused if _fused is not None and _fused.group is rank_group(group) else None


def best_choice(seconds: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> AllreduceChoice:
    """The bounds with the least time over all sizes, each size counted equally (the least product of times).

    seconds: by kernel, one value per size, infinite where it does not take the size. NCCL is always there.
    """

    def cost(choice: AllreduceChoice) -> float:
        kernels = [choice.kernel(size) for size in sizes]
        if any(kernel not in seconds for kernel in kernels):
            return math.inf
        return sum(math.log(seconds[kernel][i]) for i, kernel in enumerate(kernels))

    bounds = (0, *sizes)
    choices = [
        AllreduceChoice(pushed_rows=a, one_shot_rows=b, two_shot_rows=c, two_shot_stores_rows=d)
        for a, b, c, d in itertools.combinations_with_replacement(bounds, 4)
    ]
    return min(choices, key=cost)


def choose_allreduce(
    *,
    num_features: int,
    dtype: torch.dtype,
    max_rows: int,
    device: torch.device,
    tuner: Tuner | None = None,
    kernels: Sequence[str] = ALL_KERNELS,
    quantizes: bool = False,
) -> str:
    """Let the group's all-reduces before a norm use the fastest kernels from now on. Every rank calls it, outside of a capture.

    num_features, dtype: D and the dtype of the messages. max_rows: of the largest one. tuner: rank 0's is asked; None: the device's.
    kernels: to choose among, NCCL first. quantizes: whether some also quantize the norm to float8; they are measured on their own, because
    they write other amounts. → a sentence about the choices, with the reason where NCCL runs all. Raises `RuntimeError` where a kernel
    never ends: the process has to end then.
    """
    from compile_and_serve.custom_ops.triton_common import num_sms

    group = rank_group()
    layout = layout_for(group.size, num_features, dtype, max_rows, num_sms(device), has_parts=TWO_SHOT_STORES in kernels)
    memory = map_symmetric_memory(group.rank, layout, group.process_group, device)
    if isinstance(memory, str):
        if group.rank == 0:
            log.warning("All-reduces go over NCCL alone: %s.", memory)
        return f"over NCCL: {memory}"
    tuner = tuner or tuner_of(device)
    if group.rank != 0:
        tuner = Tuner("")  # rank 0 keeps what all have measured
    name = f"{group.size} ranks, {num_features} x {dtype}, {layout.max_rows} rows, {', '.join(kernels)}"
    is_new = False

    def of_rank_0(kept: Measurement | None) -> Measurement | None:
        values = [kept]
        dist.broadcast_object_list(values, group_src=0, group=group.process_group, device=device)
        return values[0]

    def best(*, quantized: bool) -> AllreduceChoice:
        def measure() -> Measurement:
            nonlocal is_new
            is_new = True
            return _measured(group, memory, num_features, dtype, device, kernels, quantized)

        problem = Problem(kind="allreduce", name=f"{name}, quantized to float8" if quantized else name)
        measured = tuner.measure(problem, kernels, measure, of_rank_0)
        assert measured is not None, "NCCL runs"
        return best_choice(measured.seconds, _sizes(memory))

    choice = best(quantized=False)
    quantized_choice = best(quantized=True) if quantizes else choice
    if {choice, quantized_choice} != {AllreduceChoice()}:  # otherwise the memory is freed
        use_symmetric_memory(memory, choice, quantized_choice)
    sentence = choice.sentence()
    if quantized_choice != choice:
        sentence += f"; with the norm quantized to float8 {quantized_choice.sentence()}"
    sentence += "" if is_new else ", as measured at an earlier start"
    if group.rank == 0:
        log.info("All-reduces before a norm go %s.", sentence)
    return sentence


def runs(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    memory: SymmetricMemory,
    quantized: Quantized | None = None,
) -> dict[str, Run]:
    """One call of each kernel that takes the message, → (s, y). quantized: receives y quantized, and its scales."""
    from compile_and_serve.custom_ops.collectives import triton_allreduce
    from compile_and_serve.custom_ops.collectives.triton_allreduce_stores import two_shot_stores_allreduce_add_rms_norm
    from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm

    args = (x_TD, residual_TD, weight_D, eps, memory, quantized)

    def over_nccl() -> tuple[torch.Tensor, torch.Tensor]:
        normed_TD, total_TD = add_rms_norm(all_reduce(x_TD), residual_TD, weight_D, eps, quantized)
        return total_TD, normed_TD

    all_runs: dict[str, Run] = {NCCL: over_nccl}
    if triton_allreduce.takes_pushed(x_TD, memory):
        all_runs[PUSHED] = partial(triton_allreduce.pushed_allreduce_add_rms_norm, *args)
    if triton_allreduce.takes(x_TD, memory):
        all_runs[ONE_SHOT] = partial(triton_allreduce.one_shot_allreduce_add_rms_norm, *args)
        all_runs[TWO_SHOT] = partial(triton_allreduce.two_shot_allreduce_add_rms_norm, *args)
        if memory.layout.has_parts:
            all_runs[TWO_SHOT_STORES] = partial(two_shot_stores_allreduce_add_rms_norm, *args)
    return all_runs


def rank_seconds(
    kernel: str, calls: Sequence[Run], device: torch.device, *, repeats: int, rounds: int
) -> tuple[list[float], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Device seconds of one call in each round, on this rank, and the last result of each call.

    The calls take turns, `repeats` of them in one CUDA graph. Every rank calls it. Raises `RuntimeError` where they never end.
    """
    results: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.empty(0), torch.empty(0))] * len(calls)

    def call(number: int) -> None:
        results[number % len(calls)] = calls[number % len(calls)]()

    [seconds] = call_seconds([call], device, num_calls=repeats, num_rounds=rounds, before_round=dist.barrier, wait=partial(_wait, kernel))
    return seconds, [(total.clone(), normed.clone()) for total, normed in results]


def _sizes(memory: SymmetricMemory) -> list[int]:
    return [size for size in SIZES if size <= memory.layout.max_rows]


def _measured(
    group: RankGroup,
    memory: SymmetricMemory,
    num_features: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Sequence[str],
    quantized: bool,
) -> Measurement:
    """The times of the slowest rank, for each kernel and size. A kernel whose results differ from NCCL's is left out.

    quantized: the kernels also quantize the norm to float8.
    """
    sizes = _sizes(memory)
    shared = torch.Generator(device).manual_seed(0)
    own = torch.Generator(device).manual_seed(1 + group.rank)
    residual_TD = torch.randn(sizes[-1], num_features, generator=shared, device=device).to(dtype)
    weight_D = torch.randn(num_features, generator=shared, device=device).to(dtype)
    x_TD = torch.randn(sizes[-1], num_features, generator=own, device=device).to(dtype)
    messages = [x_TD * factor for factor in MESSAGES]

    def calls(size: int) -> dict[str, list[Run]]:
        outputs = float8_like(x_TD[:size]) if quantized else None
        all_runs = [runs(x_TD[:size], residual_TD[:size], weight_D, EPS, memory, outputs) for x_TD in messages]
        return {kernel: [by_kernel[kernel] for by_kernel in all_runs] for kernel in kernels if kernel in all_runs[0]}

    seconds: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for size in sizes:
        expected = None
        by_kernel = calls(size)
        for kernel in list(seconds):
            if kernel not in by_kernel:
                seconds[kernel].append(math.inf)
                continue
            times, results = rank_seconds(kernel, by_kernel[kernel], device, repeats=REPEATS, rounds=ROUNDS)
            expected = results if expected is None else expected  # NCCL's, which is the first
            error = max(
                _relative_error(ours, theirs)
                for result, right in zip(results, expected, strict=True)
                for ours, theirs in zip(result, right, strict=True)
            )
            told = torch.tensor([*times, error], dtype=torch.float64, device=device)
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group.process_group)
            *slowest, error = told.tolist()
            if not error < 4 * torch.finfo(dtype).eps:
                log.warning("%s all-reduces are not used: at %d rows one is off by %.2g from NCCL's.", kernel, size, error)
                del seconds[kernel]
            else:
                seconds[kernel].append(min(slowest))
    platform_of(device).release_cached()
    if group.rank == 0:
        table = {
            kernel: {n: round(s * 1e6, 1) for n, s in zip(sizes, times, strict=True) if math.isfinite(s)}
            for kernel, times in seconds.items()
        }
        what = "addition, norm and float8" if quantized else "addition and norm"
        log.info("Microseconds of an all-reduce with %s, by rows of %d: %s", what, num_features, table)
    return Measurement(seconds=seconds)


def float8_like(x_TD: torch.Tensor) -> Quantized:
    """Uninitialized tensors for x quantized to float8_e4m3fn, [T, D], and its scales, float32 [T, 1]."""
    scale_T1 = x_TD.new_empty(x_TD.shape[0], 1, dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape, dtype=torch.float8_e4m3fn), scale_T1


def _wait(kernel: str, event: TimedEvent) -> None:
    """Wait for an event, but not for ever."""
    until = time.monotonic() + MAX_SECONDS
    while not event.query():
        if time.monotonic() > until:
            raise RuntimeError(
                f"an all-reduce ({kernel}) did not end within {MAX_SECONDS:g} seconds: turn these kernels off with "
                "--disable-custom-all-reduce"
            )
        time.sleep(0.0005)


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Infinite where ours is not a number."""
    error = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
    return error if math.isfinite(error) else math.inf

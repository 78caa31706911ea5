"""Which way a fused all-reduce takes, by the size of its message: measured once by all ranks together, and kept in a file.

Rank 0 says what is kept; where nothing is, every rank measures at the same time and a way is as slow as its slowest rank finds it. So all
ranks always choose the same, as they must: they wait for each other in different ways.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.build.cpp import cache_folder
from compile_and_serve.custom_ops.build.sources import kernel_digest
from compile_and_serve.custom_ops.collectives.collectives import (
    TensorParallelGroup,
    all_reduce,
    tensor_parallel_group,
)
from compile_and_serve.custom_ops.collectives.symmetric_memory import PeerMemory, layout_for, map_peer_memory
from compile_and_serve.custom_ops.tuning.measurement_store import keep, read_kept

log = logging.getLogger(__name__)

NCCL, PUSHED, ONE_SHOT, TWO_SHOT, TWO_SHOT_STORES = "nccl", "pushed", "one_shot", "two_shot", "two_shot_stores"
ALL_WAYS = (NCCL, PUSHED, ONE_SHOT, TWO_SHOT, TWO_SHOT_STORES)
# Rows that are measured, as far as there is room for them.
SIZES = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
EPS = 1e-6
REPEATS, ROUNDS = 21, 5
MESSAGES = (1.0, -1.0, 0.5)  # times x, by turns: what lay in either of two places before makes a wrong sum
FIRST_RUN_SECONDS = 60.0  # for a kernel that another rank may still have to compile

_IN_WORDS = {
    PUSHED: "pushed",
    ONE_SHOT: "in one shot",
    TWO_SHOT: "in two shots",
    TWO_SHOT_STORES: "in two shots by stores",
}

Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllreduceChoice:
    """Messages of up to pushed_rows are pushed, then those of up to one_shot_rows go in one shot, of up to two_shot_rows in two, of up to
    two_shot_stores_rows in two by stores, larger ones over NCCL.
    """

    pushed_rows: int = 0
    one_shot_rows: int = 0
    two_shot_rows: int = 0
    two_shot_stores_rows: int = 0

    def bounds(self) -> dict[str, int]:
        """Rows of the largest message of each way, in the order in which they are asked; NCCL has none."""
        return {
            PUSHED: self.pushed_rows,
            ONE_SHOT: self.one_shot_rows,
            TWO_SHOT: self.two_shot_rows,
            TWO_SHOT_STORES: self.two_shot_stores_rows,
        }

    def way(self, num_rows: int) -> str:
        """NCCL, PUSHED, ONE_SHOT, TWO_SHOT or TWO_SHOT_STORES."""
        return next((way for way, rows in self.bounds().items() if num_rows <= rows), NCCL)

    def sentence(self) -> str:
        """For people."""
        parts, largest = [], 0
        for way, rows in self.bounds().items():
            if rows > largest:
                parts.append(f"{_IN_WORDS[way]} up to {rows} rows")
                largest = rows
        return ", ".join([*parts, "then over NCCL" if parts else "over NCCL"])


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAllreduce:
    """How the all-reduces before a norm run in a group: over the ranks' symmetric memory, each kernel up to its number of rows."""

    group: TensorParallelGroup
    memory: PeerMemory
    choice: AllreduceChoice


_fused: FusedAllreduce | None = None


def use_symmetric_memory(memory: PeerMemory, choice: AllreduceChoice) -> None:
    """From now on, all-reduces before a norm run as `choice` says. Every rank calls it with the same choice."""
    global _fused
    _fused = FusedAllreduce(group=tensor_parallel_group(), memory=memory, choice=choice)


def fused_allreduce() -> FusedAllreduce | None:
    """What `use_symmetric_memory` chose for the group that this process is in; None: NCCL."""
    return _fused if _fused is not None and _fused.group is tensor_parallel_group() else None


def best_choice(seconds: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> AllreduceChoice:
    """The bounds with which all sizes together take the least time, each size counted equally (by the product of its times).

    seconds: by way, one a size, infinite where it cannot be taken; NCCL is always there.
    """

    def cost(choice: AllreduceChoice) -> float:
        ways = [choice.way(size) for size in sizes]
        if any(way not in seconds for way in ways):
            return math.inf
        return sum(math.log(seconds[way][i]) for i, way in enumerate(ways))

    bounds = (0, *sizes)
    choices = [
        AllreduceChoice(pushed_rows=a, one_shot_rows=b, two_shot_rows=c, two_shot_stores_rows=d)
        for a, b, c, d in itertools.combinations_with_replacement(bounds, 4)
    ]
    return min(choices, key=cost)


def choose_allreduce(
    *, num_features: int, dtype: torch.dtype, max_rows: int, device: torch.device, file: Path | None = None,
    ways: Sequence[str] = ALL_WAYS,
) -> str:  # fmt: skip
    """Have the group's all-reduces before a norm go the fastest way from now on. Every rank calls it, outside of a capture.

    num_features, dtype: D and the dtype of the messages. max_rows: of the largest one. file: where choices are kept; None: in the
    user's cache. ways: to choose among, NCCL first. → a sentence that says how they go, and why where it is over NCCL alone. Raises
    `RuntimeError` where a kernel never ends: the process has then to end too.
    """
    from compile_and_serve.custom_ops.triton_common import num_sms

    group = tensor_parallel_group()
    layout = layout_for(group.size, num_features, dtype, max_rows, num_sms(device), has_parts=TWO_SHOT_STORES in ways)
    peers = map_peer_memory(group.rank, layout, group.process_group, device)
    if isinstance(peers, str):
        if group.rank == 0:
            log.warning("All-reduces go over NCCL alone: %s.", peers)
        return f"over NCCL: {peers}"
    file = _default_file() if file is None else file
    problem = (
        f"{torch.cuda.get_device_name(device)}, {group.size} ranks, {num_features} x {dtype}, {layout.max_rows} rows, "
        f"{', '.join(ways)}"
    )
    kept: list[dict[str, int] | None] = [read_kept(file).get(problem) if group.rank == 0 else None]
    dist.broadcast_object_list(kept, src=0, group=group.process_group, device=device)
    if kept[0] is not None:
        choice = AllreduceChoice(**kept[0])
    else:
        choice = _measured(group, peers, num_features, dtype, device, ways)
        if group.rank == 0:
            keep(file, {problem: asdict(choice)})
    if choice != AllreduceChoice():  # else the memory is given back
        use_symmetric_memory(peers, choice)
    sentence = choice.sentence() + (", as measured at an earlier start" if kept[0] is not None else "")
    if group.rank == 0:
        log.info("All-reduces before a norm go %s.", sentence)
    return sentence


def runs(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, peers: PeerMemory
) -> dict[str, Run]:
    """One call of each way that takes the message, → (s, y)."""
    from compile_and_serve.custom_ops.collectives import triton_allreduce as over_peers
    from compile_and_serve.custom_ops.collectives.triton_allreduce_stores import two_shot_stores_allreduce_add_rms_norm
    from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm

    args = (x_TD, residual_TD, weight_D, eps, peers)

    def over_nccl() -> tuple[torch.Tensor, torch.Tensor]:
        normed_TD, total_TD = add_rms_norm(all_reduce(x_TD), residual_TD, weight_D, eps)
        return total_TD, normed_TD

    all_runs: dict[str, Run] = {NCCL: over_nccl}
    if over_peers.takes_pushed(x_TD, peers):
        all_runs[PUSHED] = lambda: over_peers.pushed_allreduce_add_rms_norm(*args)
    if over_peers.takes(x_TD, peers):
        all_runs[ONE_SHOT] = lambda: over_peers.one_shot_allreduce_add_rms_norm(*args)
        all_runs[TWO_SHOT] = lambda: over_peers.two_shot_allreduce_add_rms_norm(*args)
        if peers.layout.has_parts:
            all_runs[TWO_SHOT_STORES] = lambda: two_shot_stores_allreduce_add_rms_norm(*args)
    return all_runs


def graph_seconds(
    way: str, calls: Sequence[Run], *, repeats: int, rounds: int
) -> tuple[list[float], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Device time of one call in each round, as part of a CUDA graph of `repeats` calls, one after the other by turns, and what the last
    of each gave. Every rank calls it. Raises `RuntimeError` where they never end.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        _wait(way)
    graph = torch.cuda.CUDAGraph()
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    # NCCL's watchdog looks at events of other collectives meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(repeats):
            results = [*results, calls[i % len(calls)]()][-len(calls) :]
    seconds = []
    for i in range(rounds + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        _wait(way)
        if i:  # the first replay uploads the graph
            seconds.append(start.elapsed_time(end) / 1e3 / repeats)
    first = repeats % len(calls)  # the call that the oldest of the results is of
    by_call = [results[(i - first) % len(calls)] for i in range(len(calls))]
    return seconds, [(total.clone(), normed.clone()) for total, normed in by_call]


def _measured(
    group: TensorParallelGroup, peers: PeerMemory, num_features: int, dtype: torch.dtype, device: torch.device,
    among: Sequence[str],
) -> AllreduceChoice:  # fmt: skip
    sizes = [size for size in SIZES if size <= peers.layout.max_rows]
    shared = torch.Generator(device).manual_seed(0)
    own = torch.Generator(device).manual_seed(1 + group.rank)
    residual_TD = torch.randn(sizes[-1], num_features, generator=shared, device=device).to(dtype)
    weight_D = torch.randn(num_features, generator=shared, device=device).to(dtype)
    x_TD = torch.randn(sizes[-1], num_features, generator=own, device=device).to(dtype)
    messages = [x_TD * factor for factor in MESSAGES]

    def calls(size: int) -> dict[str, list[Run]]:
        all_runs = [runs(x_TD[:size], residual_TD[:size], weight_D, EPS, peers) for x_TD in messages]
        return {way: [by_way[way] for by_way in all_runs] for way in among if way in all_runs[0]}

    for size in (1, sizes[-1]):  # a kernel that waits for what never comes would wait for ever
        for way, run in calls(size).items():
            run[0]()
            _wait(way)
    seconds: dict[str, list[float]] = {way: [] for way in among}
    for size in sizes:
        expected = None
        ways = calls(size)
        for way in list(seconds):
            if way not in ways:
                seconds[way].append(math.inf)
                continue
            times, results = graph_seconds(way, ways[way], repeats=REPEATS, rounds=ROUNDS)
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
                log.warning("%s all-reduces are not used: at %d rows one is off by %.2g from NCCL's.", way, size, error)
                del seconds[way]
            else:
                seconds[way].append(min(slowest))
    torch.cuda.empty_cache()
    if group.rank == 0:
        table = {
            way: {n: round(s * 1e6, 1) for n, s in zip(sizes, of, strict=True) if math.isfinite(s)}
            for way, of in seconds.items()
        }
        log.info("Microseconds of an all-reduce with addition and norm, by rows of %d: %s", num_features, table)
    return best_choice(seconds, sizes)


def _wait(way: str) -> None:
    """For all that this stream was given, unless it never ends."""
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + FIRST_RUN_SECONDS
    while not done.query():
        if time.monotonic() > until:
            raise RuntimeError(
                f"an all-reduce ({way}) did not end within {FIRST_RUN_SECONDS:g} seconds: do without, with "
                "--disable-custom-all-reduce"
            )
        time.sleep(0.0005)


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Infinite where ours is not a number."""
    error = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
    return error if math.isfinite(error) else math.inf


def _default_file() -> Path:
    """Named after the kernels' source, so that a choice does not outlive what was measured."""
    return cache_folder() / f"allreduce-{kernel_digest()}-torch{torch.__version__}.json"

"""Times calls: on CUDA as a graph replays them, on the CPU by the wall clock."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[
    [int], object
]  # its argument is the number of the call, so that calls can take turns on several operands

_LONG_CALL_ROUNDS = 2
_CPU_SAMPLE_SECONDS = 2e-4  # a shorter call is repeated for this long


def cuda_seconds(
    calls: Sequence[Call],
    *,
    num_calls: int,
    num_rounds: int,
    long_call_seconds: float = math.inf,
    before_round: Callable[[], None] = lambda: None,
    wait: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize,
) -> list[list[float]]:
    """Device seconds of one call of each, for each round. The calls take turns.

    num_calls: calls in the CUDA graph that a round replays, so that launches do not count. long_call_seconds: a longer call is timed
    without a graph, in fewer rounds. before_round: runs before each. wait: waits for an event on the device.
    """
    prepared = [_prepare(call, num_calls, long_call_seconds, wait) for call in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(num_rounds):
        for (launch, count), rounds in zip(prepared, seconds, strict=True):
            if count > 1 or number < _LONG_CALL_ROUNDS:
                before_round()
                rounds.append(event_seconds(launch, wait) / count)
    return seconds


def _prepare(
    call: Call, num_calls: int, long_call_seconds: float, wait: Callable[[torch.cuda.Event], None]
) -> tuple[Callable[[], object], int]:
    """What a round launches, and how many calls that is."""
    event_seconds(lambda: call(0), wait)  # kernels are built at the first call
    if event_seconds(lambda: call(0), wait) > long_call_seconds:
        return lambda: call(0), 1

    def calls_in_turn() -> None:
        for number in range(num_calls):
            call(number)

    graph = capture(calls_in_turn)
    event_seconds(graph.replay, wait)  # the first replay uploads the graph
    return graph.replay, num_calls


def event_seconds(
    work: Callable[[], object], wait: Callable[[torch.cuda.Event], None] = torch.cuda.Event.synchronize
) -> float:
    """Device seconds between events around `work` on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    wait(end)
    return start.elapsed_time(end) / 1e3


def capture(work: Callable[[], object], warm_up: int = 1) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph of a stream of its own. It runs `warm_up` times on that stream before.

    Without a warm-up, buffers that a library makes at its first call on a stream would belong to the graph.
    """
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            work()
        torch.cuda.synchronize()
        gc.disable()  # freeing a tensor of another stream may break a capture
        try:
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the device meanwhile
            try:
                work()
            finally:
                graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@functools.cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


def cpu_seconds(calls: Sequence[Call], *, num_rounds: int) -> list[list[float]]:
    """Seconds of one call of each by the wall clock, for each round. The calls take turns."""
    repeats = []
    for call in calls:
        call(0)
        start = time.perf_counter()
        call(0)
        repeats.append(max(1, math.ceil(_CPU_SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(num_rounds):
        for call, count, rounds in zip(calls, repeats, seconds, strict=True):
            start = time.perf_counter()
            for number in range(count):
                call(number)
            rounds.append((time.perf_counter() - start) / count)
    return seconds

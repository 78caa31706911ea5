"""Times calls: as graphs replay them where the device replays graphs, by the clock elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import Platform, TimedEvent

Call = Callable[[int], object]  # its argument is the number of the call, so that calls can take turns on several operands
Wait = Callable[[TimedEvent], None]

_LONG_CALL_ROUNDS = 2
_SAMPLE_SECONDS = 2e-4  # without graphs, a shorter call is repeated for this long


def call_seconds(
    calls: Sequence[Call],
    device: torch.device,
    *,
    num_calls: int,
    num_rounds: int,
    long_call_seconds: float = math.inf,
    before_round: Callable[[], None] = lambda: None,
    wait: Wait = lambda event: event.synchronize(),
) -> list[list[float]]:
    """Device seconds per call of each, for each round. The calls take turns.

    num_calls: calls in the graph that a round replays, so that launches do not count. long_call_seconds: a longer call is timed without a
    graph, in fewer rounds. before_round: runs before each. wait: waits for an event. Without graphs, calls are repeated instead.
    """
    platform = platform_of(device)
    if platform.replays_graphs:
        prepared = [_captured(call, platform, num_calls, long_call_seconds, wait) for call in calls]
    else:
        prepared = [_repeated(call, platform) for call in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(num_rounds):
        for (launch, count), rounds in zip(prepared, seconds, strict=True):
            if not platform.replays_graphs or count > 1 or number < _LONG_CALL_ROUNDS:
                before_round()
                rounds.append(_seconds_of(launch, platform, wait) / count)
    return seconds


def _captured(call: Call, platform: Platform, num_calls: int, long_call_seconds: float, wait: Wait) -> tuple[Callable[[], object], int]:
    """What a round launches, and its number of calls."""
    _seconds_of(lambda: call(0), platform, wait)  # kernels are built at the first call
    if _seconds_of(lambda: call(0), platform, wait) > long_call_seconds:
        return lambda: call(0), 1
    graph = platform.capture(lambda: _call_in_turn(call, num_calls))
    _seconds_of(graph.replay, platform, wait)  # the first replay uploads the graph
    return graph.replay, num_calls


def _repeated(call: Call, platform: Platform) -> tuple[Callable[[], object], int]:
    """As `_captured`: as many calls as take `_SAMPLE_SECONDS`."""
    call(0)
    seconds = _seconds_of(lambda: call(0), platform, lambda event: event.synchronize())
    count = max(1, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-7)))
    return lambda: _call_in_turn(call, count), count


def _call_in_turn(call: Call, count: int) -> None:
    for number in range(count):
        call(number)


def _seconds_of(work: Callable[[], object], platform: Platform, wait: Wait) -> float:
    start = platform.record_timed_event()
    work()
    end = platform.record_timed_event()
    wait(end)
    return end.seconds_since(start)

"""Timing on CUDA by graph replay, and the fields that every row of a GPU benchmark carries."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import commit


@functools.cache
def environment() -> dict[str, str]:
    """Device, versions and commit of this run."""
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "commit": commit()}


def emit(**row: Any) -> None:
    """Print one JSON line: the row, then the environment."""
    print(json.dumps({**row, **environment()}), flush=True)


def capture(fn: Callable[[], Any], warmup: int = 2) -> torch.cuda.CUDAGraph:
    """Run fn `warmup` times on a side stream, then capture it as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        fn()
    return graph


def replay_ms(
    graph: torch.cuda.CUDAGraph, budget_ms: float = 60.0, groups: int = 5, before: Callable[[int], None] | None = None,
    most_repeats: int = 200,
) -> float:  # fmt: skip
    """Median over groups of the time of one replay, in milliseconds, by device events.

    before: called with the number of replays that follow in a row, outside of what is timed.
    """
    before = before or (lambda repeats: None)
    before(2)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    repeats = max(1, min(most_repeats, int(budget_ms / groups / max(start.elapsed_time(end), 1e-3))))
    times = []
    for _ in range(groups):
        before(repeats)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return sorted(times)[groups // 2]


def time_ms(fn: Callable[[], Any], budget_ms: float = 60.0) -> float:
    """Milliseconds of fn's device work, as a graph replays it."""
    return replay_ms(capture(fn), budget_ms)


def event_ms(fn: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds between events around fn, for work that no graph can hold."""
    fn()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def kernels_of(fn: Callable[[], Any], repeats: int = 1, top: int = 14) -> dict[str, Any]:
    """Milliseconds and calls in one fn() of the kernels that take longest, by name, and of all together."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels_ms": round(sum(e.self_device_time_total for e in events) / 1e3 / repeats, 3),
        "kernels": [
            {"name": e.key[:95], "ms": round(e.self_device_time_total / 1e3 / repeats, 3), "calls": e.count // repeats}
            for e in events[:top]
        ],
    }


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float32."""
    return ((out.float() - reference.float()).norm() / reference.float().norm()).item()

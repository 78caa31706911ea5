"""Timing on CUDA by replaying graphs, and the fields that every row of a GPU benchmark has."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from triton.runtime import Autotuner, Heuristics, JITFunction

from benchmarks.common import commit
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import CapturedGraph, TimedEvent


@functools.cache
def environment() -> dict[str, str]:
    """Device, versions and commit."""
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "commit": commit()}


def emit(**row: Any) -> None:
    """Print one JSON line: the row, then the environment."""
    print(json.dumps({**row, **environment()}), flush=True)


def capture(work: Callable[[], object], warm_up: int = 1) -> CapturedGraph:
    """`work` as a graph of the current device: see `Platform.capture`."""
    return platform_of(torch.device("cuda")).capture(work, warm_up)


def event_seconds(work: Callable[[], object]) -> float:
    """Device seconds between events around `work` on the current stream."""
    platform = platform_of(torch.device("cuda"))
    start = platform.record_timed_event()
    work()
    end = platform.record_timed_event()
    end.synchronize()
    return end.seconds_since(start)


def replay_ms(graph: CapturedGraph, budget_ms: float = 60.0, groups: int = 5) -> float:
    """Milliseconds of one replay, between device events: the median over groups of replays."""
    graph.replay()
    repeats = max(1, min(200, int(budget_ms / groups / max(event_seconds(graph.replay) * 1e3, 1e-3))))

    def group() -> None:
        for _ in range(repeats):
            graph.replay()

    return sorted(event_seconds(group) * 1e3 / repeats for _ in range(groups))[groups // 2]


def in_turns_ms(graphs: Mapping[str, CapturedGraph], rounds: int = 3, heat_ms: float = 300.0) -> dict[str, float]:
    """→ milliseconds of one replay by name: the median over rounds.

    The device is warmed up for heat_ms, and graphs take turns, so that none runs on a cooler device.
    """
    first = next(iter(graphs.values()))
    for _ in range(int(heat_ms / max(replay_ms(first, budget_ms=1.0, groups=1), 1e-3))):
        first.replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_ms(graph, budget_ms=20.0, groups=3))
    return {name: sorted(of_name)[rounds // 2] for name, of_name in times.items()}


class StepTimes:
    """Records device events around the steps that an executor in this process launches inside the `with` block."""

    LATE_MS = 0.005  # if the device was idle for longer, the host launched the step too late

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._launch = executor.launch
        self._platform = executor.worker.platform
        self._steps: list[tuple[int, int, TimedEvent, TimedEvent, float]] = []

    def __enter__(self) -> StepTimes:
        def launch(scheduled: Any) -> Any:
            started = time.perf_counter()
            begin = self._platform.record_timed_event()
            handle = self._launch(scheduled)
            end = self._platform.record_timed_event()
            host_ms = (time.perf_counter() - started) * 1e3
            tokens, requests = scheduled.total_num_scheduled_tokens, len(scheduled.num_scheduled_tokens)
            self._steps.append((tokens, requests, begin, end, host_ms))
            return handle

        self._executor.launch = launch
        return self

    def __exit__(self, *error: object) -> None:
        del self._executor.launch  # uncovers the class's method
        self._platform.synchronize()

    def decode_seconds(self, batch: int) -> float:
        """Median seconds between the ends of two steps in a row of `batch` decodes each, host gaps included; nan if there are none."""
        ends = [(tokens == requests == batch, end) for tokens, requests, _, end, _ in self._steps]
        steps = [end.seconds_since(before) for (first, before), (second, end) in pairwise(ends) if first and second]
        return statistics.median(steps) if steps else math.nan

    def of_decodes(self, batch: int) -> dict[str, float]:
        """Figures over the steps that consist of `batch` decodes and follow another step; empty if there are none.

        host_gap: the share of their time in which the device is idle. The host's time to launch a late step counts as idle,
            although the device may already have begun the step.
        late: the share of steps before which the device was idle.
        device_ms: mean time on the device of the steps that were not late; left out if all were.
        """
        work, idle, count = 0.0, 0.0, 0
        in_time: list[float] = []
        for (_, _, _, before, _), (tokens, requests, begin, end, host_ms) in pairwise(self._steps):
            if tokens == requests == batch:
                gap, ms = begin.seconds_since(before) * 1e3, end.seconds_since(begin) * 1e3
                count += 1
                if gap > self.LATE_MS:
                    idle += gap + min(host_ms, ms)
                    work += ms - min(host_ms, ms)
                else:
                    idle += gap
                    work += ms
                    in_time.append(ms)
        if not count:
            return {}
        device = {"device_ms": round(sum(in_time) / len(in_time), 3)} if in_time else {}
        return device | {"host_gap": round(idle / (work + idle), 3), "late": round(1 - len(in_time) / count, 3)}

    def by_batch(self, width: int = 16) -> dict[str, dict[str, float]]:
        """The steps of decodes alone that follow such a step, by batch size in ranges of width: how many, and mean milliseconds from
        the end of the step before to their end.
        """
        times: dict[int, list[float]] = {}
        for before, (tokens, requests, _, end, _) in pairwise(self._steps):
            if tokens == requests and before[0] == before[1]:
                times.setdefault(-(-tokens // width) * width, []).append(end.seconds_since(before[3]) * 1e3)
        return {
            f"{most - width + 1}-{most}": {"steps": len(times[most]), "ms": round(statistics.mean(times[most]), 3)}
            for most in sorted(times)
        }

    def of_prompts(self) -> dict[str, float]:
        """The steps with more than one token of some request: how many, their tokens, and their milliseconds on the device.

        If launching a step takes the host longer than the device needs, the host's time is included.
        """
        steps = [(tokens, end.seconds_since(begin) * 1e3) for tokens, requests, begin, end, _ in self._steps if tokens > requests]
        return {"steps": len(steps), "tokens": sum(tokens for tokens, _ in steps), "ms": round(sum(ms for _, ms in steps), 1)}


def time_ms(fn: Callable[[], Any], budget_ms: float = 60.0) -> float:
    """Milliseconds of fn's work on the device, replayed as a graph."""
    return replay_ms(capture(fn, warm_up=2), budget_ms)


def event_ms(fn: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds between events around fn, for work that cannot be captured in a graph."""
    fn()
    return sorted(event_seconds(fn) * 1e3 for _ in range(repeats))[repeats // 2]


def own_times(intervals: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """Of intervals (name, start, end), by name: from when all that end earlier have ended, or from the start if that is later, to the end.

    So the time in which a kernel that started early (PDL) waits for the ones before it does not count.
    """
    times: dict[str, list[float]] = {}
    ended = -math.inf
    for name, start, end in sorted(intervals, key=lambda interval: interval[2]):
        times.setdefault(name, []).append(end - max(start, ended))
        ended = end
    return times


def _intervals(fn: Callable[[], Any], repeats: int) -> list[tuple[str, float, float]]:
    """What the device does during so many fn(): (name, start, end), in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.start, e.time_range.end) for e in events]


_PRODUCT_NAMES = re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitK|_grouped_|_small_batch_kernel|_linear_kernel|wgmma", re.IGNORECASE)


def kernels_by_kind(fn: Callable[[], Any], top: int = 12) -> dict[str, Any]:
    """Milliseconds of one fn() on the device from the first kernel's start to the last one's end, of products and of fla-core's kernels."""
    return _by_kind(_intervals(fn, 1), _fla_kernels(), top)


def _by_kind(intervals: list[tuple[str, float, float]], fla_names: set[str], top: int) -> dict[str, Any]:
    ms = {name: sum(of_name) / 1e3 for name, of_name in own_times(intervals).items()}
    whole = (max(end for _, _, end in intervals) - min(start for _, start, _ in intervals)) / 1e3
    fla = {name: one for name, one in ms.items() if name in fla_names}
    products = {name: one for name, one in ms.items() if name not in fla and _PRODUCT_NAMES.search(name)}
    both = sum(fla.values()) + sum(products.values())

    def longest(of_kind: dict[str, float]) -> dict[str, float]:
        return {name[:95]: round(of_kind[name], 3) for name in sorted(of_kind, key=lambda name: -of_kind[name])[:top]}

    return {
        "device_ms": round(whole, 3),
        "kernels_ms": round(sum(ms.values()), 3),
        "products_ms": round(sum(products.values()), 3),
        "fla_ms": round(sum(fla.values()), 3),
        "ratio": round(whole / both, 3) if both else None,
        "kernels_ratio": round(sum(ms.values()) / both, 3) if both else None,
        "products": longest(products),
        "fla": longest(fla),
        "others": longest({name: one for name, one in ms.items() if name not in fla and name not in products}),
    }


def _fla_kernels() -> set[str]:
    """The names of all Triton kernels of fla-core's imported modules."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("fla.")]
    kernels = [value for module in modules for value in vars(module).values()]
    return {kernel.__name__ for kernel in map(_innermost, kernels) if isinstance(kernel, JITFunction)}


def _innermost(kernel: Any) -> Any:
    """What autotuners and heuristics are around."""
    while isinstance(kernel, (Autotuner, Heuristics)):
        kernel = kernel.fn
    return kernel


def kernels_of(fn: Callable[[], Any], repeats: int = 1, top: int = 14) -> dict[str, Any]:
    """The kernels of one fn() that take longest, with their `own_times` in milliseconds and calls, and the sum over all kernels."""
    times = own_times(_intervals(fn, repeats))
    ms = {name: sum(of_name) / 1e3 / repeats for name, of_name in times.items()}
    return {
        "kernels_ms": round(sum(ms.values()), 3),
        "kernels": [
            {"name": name[:95], "ms": round(ms[name], 3), "calls": len(times[name]) // repeats}
            for name in sorted(ms, key=lambda name: -ms[name])[:top]
        ],
    }


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float32."""
    return ((out.float() - reference.float()).norm() / reference.float().norm()).item()

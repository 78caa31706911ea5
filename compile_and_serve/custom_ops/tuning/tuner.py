"""Which of several ways to compute the same is the fastest on this device: measured once a problem, and kept in a file.

A problem is a family (everything but the number of tokens) and a range of token counts.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from compile_and_serve.custom_ops.build.cpp import cache_folder
from compile_and_serve.custom_ops.build.sources import kernel_digest
from compile_and_serve.custom_ops.build.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.tuning.measurement_store import keep, read_kept

log = logging.getLogger(__name__)

_WIDTHS = ((64, 1024), (128, 2048), (256, 4096), (2048, math.inf))  # of ranges up to so many tokens
_SMALLEST_RANGE = 16  # 2 to 16 tokens are one range: tiles have no fewer
_MAX_COPIES = 16
_MAX_COLD_TOKENS = 256  # beyond, a weight is read so often that where it lies at first does not matter
_MIN_CALLS = 4
_LONG_CALLS = 2
_CAPTURED_SECONDS = 1e-3  # a call of fewer is timed as a graph replays it: launching it may take longer than it runs


def token_range(num_tokens: int) -> int:
    """The end of the range of token counts that one choice is for: 1, powers of two from 16 to 128, then multiples of `_WIDTHS`, about a
    product's tiles of rows, whose number decides between algorithms. (One that was the best at 2048 tokens took 1.8 times the best one's
    time at 1152.)
    """
    if num_tokens <= 1:
        return 1
    if num_tokens <= 128:
        return max(_SMALLEST_RANGE, 1 << (num_tokens - 1).bit_length())
    width = next(width for width, most in _WIDTHS if num_tokens <= most)
    return -(-num_tokens // width) * width


def token_ranges(most_tokens: int) -> list[int]:
    """One token count of each range up to most_tokens: the ranges' ends, and most_tokens."""
    counts = [1]
    while counts[-1] < most_tokens:
        counts.append(min(token_range(counts[-1] + 1), most_tokens))
    return counts


class Choices:
    """The choices made so far, kept in a file: the next start chooses the same without measuring."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._chosen: dict[str, str] = read_kept(file)
        self._families: dict[str, tuple[int, int]] = {}  # the fewest and the most tokens that each is asked for with
        self._given_up: set[str] = set()  # until the next start

    def get(
        self, family: str, num_tokens: int, names: Sequence[str], seconds: Callable[[str], float] | None, first: int = 1,
        most: int = 1,
    ) -> str:  # fmt: skip
        """The choice among names (the first: the one preferred without measuring), measured where none is known.

        seconds: how long a candidate takes; one that raises is left out. None: nothing may be measured now. first: the fewest tokens that
            anyone asks for with. most: as many may come, whatever num_tokens is now.
        """
        self._was_asked(family, max(num_tokens, most), first)
        problem = _problem(family, token_range(num_tokens))
        known = self._chosen.get(problem)
        if known is not None and known in names:
            return known
        if seconds is None or problem in self._given_up:
            return names[0]
        choice, is_final = (names[0], True) if len(names) == 1 else self._measured(problem, names, seconds)
        if choice is None:
            log.warning("%s could not be measured: %s is taken.", problem, names[0])
            self._given_up.add(problem)
            return names[0]
        self._chosen[problem] = choice
        if is_final:
            keep(self._file, {problem: choice})
        return choice

    def known(self, family: str, num_tokens: int, first: int = 1) -> str | None:
        """The choice made before, whatever its name; None where there is none. first: as for `get`."""
        self._was_asked(family, num_tokens, first)
        return self._chosen.get(_problem(family, token_range(num_tokens)))

    def _was_asked(self, family: str, num_tokens: int, first: int) -> None:
        fewest, most = self._families.get(family, (first, num_tokens))
        self._families[family] = min(first, fewest), max(num_tokens, most)

    def unmeasured(self, max_tokens: int) -> tuple[int, ...]:
        """Token counts up to max_tokens, one a range, for which a family has no choice yet, as far as it was asked for with so many."""
        return tuple(
            count
            for count in token_ranges(max_tokens)
            if any(
                count >= first
                and token_range(count) <= token_range(most)
                and _problem(family, token_range(count)) not in self._chosen
                for family, (first, most) in self._families.items()
            )
        )

    def _measured(self, problem: str, names: Sequence[str], seconds: Callable[[str], float]) -> tuple[str | None, bool]:
        """The fastest, None where none runs; and whether that will be so at the next start, too: one may have lacked memory."""
        times, is_final = {}, True
        for name in names:
            try:
                times[name] = seconds(name)
            except Exception as error:  # of torch, Triton or CUTLASS: another candidate may do
                is_final &= not isinstance(error, torch.OutOfMemoryError)
                log.info("%s is no choice for %s: %s: %s", name, problem, type(error).__name__, error)
        if not times:
            return None, False
        choice = min(times, key=times.__getitem__)
        shown = ", ".join(f"{name} {s * 1e6:.1f} us" for name, s in sorted(times.items(), key=lambda item: item[1]))
        log.info("%s, fastest first: %s", problem, shown)
        return choice, is_final


def _problem(family: str, end: int) -> str:
    return f"{family} T<={end}"


def choices_of(device: torch.device) -> Choices:
    """The choices for a CUDA device, under the kernels as they are now."""
    return _choices_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _choices_of(index: int) -> Choices:
    device = torch.device("cuda", index)
    name = torch.cuda.get_device_name(device).replace(" ", "-")
    return Choices(cache_folder() / f"choices-{kernel_digest()}-{name}-torch{torch.__version__}.json")


_may_measure = True


@contextmanager
def no_measuring() -> Iterator[None]:
    """Inside, what was not measured is not measured now: somebody waits."""
    global _may_measure
    before, _may_measure = _may_measure, False
    try:
        yield
    finally:
        _may_measure = before


def fastest(
    family: str, num_tokens: int, runs: Mapping[str, Callable[[torch.Tensor], object]], weight: torch.Tensor,
    first: int = 1, most: int = 1,
) -> str:  # fmt: skip
    """The name of the fastest of several functions of a weight, measured once a family and range of token counts.

    first, most: the fewest tokens that anyone asks for with; as many as may come, whatever num_tokens is now. Measuring waits for the
    device, which nothing may do inside a graph's capture: there, under `no_measuring`, in `compile_ahead` and on other devices, what
    was not measured is the first of them.
    """
    names = tuple(runs)
    if weight.device.type != "cuda":
        return names[0]
    choices = choices_of(weight.device)
    if is_compiling_ahead():
        if _may_measure and choices.known(family, num_tokens, first) is None:
            _compile_all(runs, weight)
        return choices.get(family, num_tokens, names, None, first, most)
    if not _may_measure or torch.cuda.is_current_stream_capturing():
        return choices.get(family, num_tokens, names, None, first, most)
    timer = _Timer(weight, is_cold=num_tokens <= _MAX_COLD_TOKENS)
    choice = choices.get(family, num_tokens, names, lambda name: timer.seconds(runs[name]), first, most)
    timer.clear()
    return choice


def _compile_all(runs: Mapping[str, Callable[[torch.Tensor], object]], weight: torch.Tensor) -> None:
    """What will be measured is to be compiled."""
    for run in runs.values():
        with suppress(Exception):  # of torch, Triton or CUTLASS: `Choices` will say so
            run(weight)


def unmeasured_token_counts(device: torch.device, max_tokens: int) -> tuple[int, ...]:
    """`Choices.unmeasured` of the device: what a step before serving should be run with, so that no request waits for measuring."""
    return choices_of(device).unmeasured(max_tokens) if device.type == "cuda" else ()


class _Timer:
    """Times functions of a weight. is_cold: the weight comes from memory in each call, as in a step over many layers."""

    def __init__(self, weight: torch.Tensor, *, is_cold: bool) -> None:
        self._weight, self._is_cold = weight, is_cold
        self._calls: list[torch.Tensor] = []

    def seconds(self, run: Callable[[torch.Tensor], object]) -> float:
        """Device time of one call, the best of three."""
        if not self._calls:
            copies = self._copies()
            self._calls = [copies[i % len(copies)] for i in range(max(_MIN_CALLS, len(copies)))]

        def work() -> None:
            for weight in self._calls:
                run(weight)

        run(self._weight)  # kernels are built at the first call
        torch.cuda.synchronize(self._weight.device)
        if _elapsed(lambda: run(self._weight)) > _CAPTURED_SECONDS:
            return min(_elapsed(lambda: run(self._weight)) for _ in range(_LONG_CALLS))
        with torch.cuda.stream(_capture_stream(self._weight.device)):
            run(self._weight)  # a library's buffers are made once a stream, and shall not belong to the graph
            graph = _captured(work)
            graph.replay()
            return min(_elapsed(graph.replay) for _ in range(3)) / len(self._calls)

    def clear(self) -> None:
        """Give back the memory that measuring took, which the engine counts on."""
        if self._calls:
            self._calls = []
            torch.cuda.empty_cache()

    def _copies(self) -> list[torch.Tensor]:
        if not self._is_cold:
            return [self._weight]
        l2_bytes = torch.cuda.get_device_properties(self._weight.device).L2_cache_size
        others = -(-2 * l2_bytes // (self._weight.numel() * self._weight.element_size()))
        return [self._weight, *(self._weight.clone() for _ in range(min(others, _MAX_COPIES - 1)))]


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _elapsed(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """work as a graph of the current stream, which nothing else uses."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.disable()  # what is collected during a capture may break it
    try:
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on using the device
        try:
            work()
        finally:
            graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()
    return graph

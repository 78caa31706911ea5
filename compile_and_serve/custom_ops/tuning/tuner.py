"""The tuner measures which of several kernels is the fastest for a problem. The store keeps the result for later starts."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from compile_and_serve.custom_ops.jit.cpp import cpu_identity
from compile_and_serve.custom_ops.jit.sources import digest
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.tuning.store import MeasurementStore, tuning_folder
from compile_and_serve.custom_ops.tuning.token_ranges import token_range, token_ranges

log = logging.getLogger(__name__)

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a choice depends on, besides the device, the kernel sources and torch.

    kind: each kind has a file of its own in the store. name: shapes, dtypes and options, as text. num_tokens: of this call; the choice
    holds for its `token_range`. None: the choice holds for any number.
    """

    kind: str
    name: str
    num_tokens: int | None = None

    @property
    def key(self) -> str:
        """Its name in the store."""
        return self.name if self.num_tokens is None else f"{self.name} T<={token_range(self.num_tokens)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """seconds: by candidate, seconds per call, one value per measured size; infinite for a size that the candidate does not support.
    Candidates that failed have no entry.

    is_final: False if a later start should measure again, because a candidate ran out of memory.
    """

    seconds: Mapping[str, Sequence[float]]
    is_final: bool = True

    @property
    def fastest(self) -> str:
        """The candidate with the least geometric mean over the sizes."""
        return min(self.seconds, key=lambda name: math.prod(self.seconds[name]))


class Tuner:
    """Measures on one device. device: its name. folders: the store's; all are read, the last is written. Empty: nothing is kept."""

    def __init__(self, device: str, folders: Sequence[Path] = ()) -> None:
        self._device, self._folders = device, tuple(folders)
        self._stores: dict[str, list[MeasurementStore]] = {}  # by kind
        self._measured: dict[tuple[str, str], Measurement] = {}  # by kind and key
        self._fastest: dict[tuple[str, str], str] = {}  # by kind and key, so that steps skip the comparison
        self._failed: set[tuple[str, str]] = set()  # not tried again in this process
        self._asked: dict[tuple[str, str], tuple[int, int]] = {}  # kind and name → smallest and largest token count

    def kept(self, problem: Problem) -> Measurement | None:
        """An earlier measurement, by this process or another one."""
        key = problem.kind, problem.key
        if key not in self._measured:
            for store in self._stores_of(problem.kind):
                if (kept := store.get(problem.key)) is not None:
                    seconds = {name: [math.inf if s is None else s for s in times] for name, times in kept.items()}
                    self._measured[key] = Measurement(seconds=seconds)
                    break
        return self._measured.get(key)

    def measure(
        self,
        problem: Problem,
        candidates: Collection[str],
        time: Callable[[], Measurement] | None,
        agree: Callable[[Measurement | None], Measurement | None] = lambda kept: kept,
    ) -> Measurement | None:
        """A kept measurement, or else a new one by `time`. None if there is none and time is None (tuning is off), or if no candidate ran.

        candidates: names. A kept measurement is ignored if its fastest candidate is not among them. agree: returns rank 0's kept
        measurement on every rank, for ranks that must choose the same kernel.
        """
        key = problem.kind, problem.key
        kept = agree(self.kept(problem))
        if kept is not None and kept.fastest in candidates:
            return kept
        if time is None or key in self._failed:
            return None
        measurement = time()
        if not measurement.seconds:
            log.warning("No candidate for %s %s ran.", problem.kind, problem.key)
            self._failed.add(key)
            return None
        self._measured[key] = measurement
        if measurement.is_final and (stores := self._stores_of(problem.kind)):
            finite = {name: [s if math.isfinite(s) else None for s in times] for name, times in measurement.seconds.items()}
            stores[-1].put(problem.key, finite)
        return measurement

    def fastest(
        self,
        problem: Problem,
        candidates: Mapping[str, Candidate],
        time: Callable[[Candidate], float] | None,
        *,
        min_tokens: int = 1,
        max_tokens: int = 1,
    ) -> str:
        """The name of the fastest candidate. If there is no measurement and none can be made, the first.

        time: → seconds per call. A candidate for which it raises is left out. None: tuning is off.
        min_tokens, max_tokens: the range of token counts of this problem's calls. `unmeasured_token_counts` stays within it.
        """
        self._note(problem, min_tokens, max_tokens)
        key = problem.kind, problem.key
        known = self._fastest.get(key)
        if known is not None and known in candidates:
            return known
        measured = self.measure(problem, candidates.keys(), None if time is None else lambda: _time_each(problem, candidates, time))
        if measured is None:
            return next(iter(candidates))
        self._fastest[key] = measured.fastest
        return measured.fastest

    def unmeasured_token_counts(self, max_tokens: int) -> tuple[int, ...]:
        """Token counts up to max_tokens, one per range, for which a problem that was asked for has no choice yet."""
        return tuple(
            count
            for count in token_ranges(max_tokens)
            if any(
                min_tokens <= count
                and token_range(count) <= token_range(largest)
                and self.kept(Problem(kind=kind, name=name, num_tokens=count)) is None
                for (kind, name), (min_tokens, largest) in self._asked.items()
            )
        )

    def _note(self, problem: Problem, min_tokens: int, max_tokens: int) -> None:
        if problem.num_tokens is not None:
            largest = max(problem.num_tokens, max_tokens)
            noted_min, noted_max = self._asked.get((problem.kind, problem.name), (min_tokens, largest))
            self._asked[problem.kind, problem.name] = min(min_tokens, noted_min), max(largest, noted_max)

    def _stores_of(self, kind: str) -> list[MeasurementStore]:
        if kind not in self._stores:
            self._stores[kind] = [MeasurementStore(folder, kind, self._device) for folder in self._folders]
        return self._stores[kind]


def _time_each(problem: Problem, candidates: Mapping[str, Candidate], time: Callable[[Candidate], float]) -> Measurement:
    if len(candidates) == 1:  # nothing to measure
        return Measurement(seconds={next(iter(candidates)): ()})
    seconds, is_final = {}, True
    for name, candidate in candidates.items():
        try:
            seconds[name] = (time(candidate),)
        except Exception as error:  # by torch, Triton or CUTLASS: another candidate may run
            is_final &= not isinstance(error, torch.OutOfMemoryError)
            log.info("%s does not run for %s: %s: %s", name, problem.key, type(error).__name__, error)
    by_time = sorted(seconds.items(), key=lambda item: item[1])
    shown = ", ".join(f"{name} {s * 1e6:.1f} us" for name, (s,) in by_time)
    log.info("%s %s, fastest first: %s", problem.kind, problem.key, shown)
    return Measurement(seconds=seconds, is_final=is_final)


def device_name(device: torch.device) -> str:
    """The device's name in the store. CPUs differ by model, instructions and number of threads."""
    platform = platform_of(device)
    if not platform.runs_cpp_kernels:
        return platform.name
    lines = cpu_identity().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.name)
    return f"{model}, {torch.get_num_threads()} threads, {digest(cpu_identity())}"


def tuner_of(device: torch.device) -> Tuner:
    """This process's tuner for a device, over the user's store."""
    return _tuner_of(platform_of(device).indexed_device)


@functools.cache
def _tuner_of(device: torch.device) -> Tuner:
    return Tuner(device_name(device), [tuning_folder()])


def unmeasured_token_counts(device: torch.device, max_tokens: int) -> tuple[int, ...]:
    """`Tuner.unmeasured_token_counts` of the device. Run a step of each before serving, so that no request waits for a measurement."""
    return tuner_of(device).unmeasured_token_counts(max_tokens) if platform_of(device).runs_triton_kernels else ()


# Of each thread: an engine that serves does not keep another one from tuning while it starts.
_is_tuning_on: ContextVar[bool] = ContextVar("is_tuning_on", default=True)


def is_tuning_on() -> bool:
    """Whether kernels may be measured now."""
    return _is_tuning_on.get()


@contextmanager
def tuning_off() -> Iterator[None]:
    """Turn tuning off for this thread inside the block. Used while requests wait: measuring would delay them."""
    before = _is_tuning_on.set(False)
    try:
        yield
    finally:
        _is_tuning_on.reset(before)

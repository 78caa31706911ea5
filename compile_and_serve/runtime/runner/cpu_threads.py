"""How many threads a step on the CPU uses: as many as the system gives cores for.

Threads of a kernel wait for each other. Where other processes compute, the system makes one of them wait for its turn, and with it all
the others, several milliseconds at a time: fewer threads that are not interrupted are faster. So every `_PERIOD` seconds

    cores = idle time of the cores that this process may use + CPU time of this process, per second

is measured, and the next steps use that many threads, rounded, at most `num_threads`. Fewer threads get fewer cores, so this ends with
what others leave, or with half of what all threads would get, if that is more. After a pause steps begin with all threads: what others did
while the engine had nothing to do says little. Attention's results have the same bits with any number, because it is always split for
`num_threads`; torch's own kernels may round differently.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import loaded_cpu_kernel_library

logger = logging.getLogger(__name__)

_PERIOD = 0.2  # seconds; the system counts idle time in hundredths
# Who has fewer threads than cores cannot know what it would get of a core that a process of lower priority uses. So it tries.
_TRY_ALL_AFTER = 10.0


def idle_seconds() -> float | None:
    """Idle time since the system's start, of the cores that this process may use. None if the system does not say."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        counts = [[int(count) for count in counts] for name, *counts in map(str.split, lines) if name in cores]
    except (OSError, AttributeError, ValueError):
        return None
    if not any(map(any, counts)):  # some sandboxes show zeros
        return None
    return sum(idle + waiting for _, _, _, idle, waiting, *_ in counts) / os.sysconf("SC_CLK_TCK")


class CpuThreads:
    """Chooses the threads of each step, at most `num_threads`. idle: as `idle_seconds`."""

    def __init__(
        self,
        num_threads: int,
        *,
        idle: Callable[[], float | None] = idle_seconds,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle, self._used, self._now = idle, used, now
        self.num_threads = self.current = num_threads
        self._said, self._fewest = False, 1
        self._since = self._sampled_at = self._ended_at = now()
        sample = idle() if num_threads > 1 else None
        self._follows = sample is not None
        self._sample = used() + (sample or 0.0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """In the block, CPU kernels use as many threads as they get cores for."""
        if self._follows and self._now() - self._sampled_at >= _PERIOD:
            self._choose()
        try:
            with nullcontext() if self.current == self.num_threads else self._fewer():
                yield
        finally:
            self._ended_at = self._now()

    def _choose(self) -> None:
        now, idle = self._now(), self._idle()
        sample = self._used() + (idle or 0.0)
        cores = (sample - self._sample) / (now - self._sampled_at)
        self._sample, self._sampled_at = sample, now
        if now - self._ended_at >= _PERIOD:
            self._since, self.current = now, self.num_threads
            return
        if self.current < self.num_threads and now - self._since >= _TRY_ALL_AFTER:
            self._since, self.current = now, self.num_threads
            return
        if self.current == self.num_threads:
            self._fewest = max(1, int(cores / 2))
        chosen = min(self.num_threads, max(self._fewest, int(cores + 0.5)))
        if chosen == self.num_threads or self.current == self.num_threads:
            self._since = now
        self.current = chosen
        if chosen < self.num_threads and not self._said:
            self._said = True
            logger.info(
                "Other processes leave %.1f cores to the engine: steps use %d of its %d CPU threads while they do.",
                cores,
                chosen,
                self.num_threads,
            )

    @contextmanager
    def _fewer(self) -> Iterator[None]:
        library = loaded_cpu_kernel_library()
        if library is not None:
            library.cas_plan_threads(self.num_threads)
        torch.set_num_threads(self.current)
        try:
            yield
        finally:
            torch.set_num_threads(self.num_threads)
            if library is not None:
                library.cas_plan_threads(0)

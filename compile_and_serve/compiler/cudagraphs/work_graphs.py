"""`WorkGraphs`: CUDA graphs of work that is no model's step, for a few numbers of sequences."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from compile_and_serve.compiler.cudagraphs.graph_capture import PLAIN_STEP_LOSS, Graph, GraphDevice, capturing
from compile_and_serve.compiler.cudagraphs.runner import capture_order
from compile_and_serve.compiler.cudagraphs.stats import GraphStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one graph captures. run: reads and writes only tensors that keep their addresses. addresses: of those of its tensors that a
    caller may pass from elsewhere.
    """

    name: str
    run: Callable[[], None]
    addresses: tuple[int, ...] = ()


WorkOf = Callable[[int], Iterable[Work]]


class WorkGraphs:
    """Replays work on a number of sequences, if it was captured for that number and with the same addresses.

    sizes: ascending numbers of sequences. All work of one size is captured at once. kind: under which `stats` counts.
    """

    def __init__(self, sizes: Sequence[int], device: GraphDevice, stats: GraphStats, kind: str) -> None:
        self.sizes = tuple(sizes)
        self._kind = kind
        stats.replays.setdefault(kind, 0)
        stats.captured.setdefault(kind, 0)
        self._device, self._stats = device, stats
        self._work_of: WorkOf | None = None
        self._graphs: dict[tuple[str, int], tuple[Graph, tuple[int, ...]]] = {}
        self._captured: list[int] = []  # ascending
        self._waiting = capture_order(self.sizes)
        self._lost = dict.fromkeys(self.sizes, 0.0)

    def bind(self, work_of: WorkOf | None) -> None:
        """Say what is captured: size → its work, each piece of which may run until the next is asked for. None: nothing yet."""
        assert not self._graphs, "graphs of other tensors are captured already"
        self._work_of = work_of

    def padded_size(self, num_seqs: int) -> int | None:
        """The smallest captured size that holds so many sequences; None where there is none."""
        index = bisect.bisect_left(self._captured, num_seqs)
        return self._captured[index] if index < len(self._captured) else None

    def holds(self, name: str, size: int) -> bool:
        """Whether there is a graph of this work for `size` sequences."""
        return (name, size) in self._graphs

    def replay(self, name: str, size: int, addresses: tuple[int, ...] = ()) -> bool:
        """Replay captured work; False where there is no graph of it."""
        found = self._graphs.get((name, size))
        if found is None or found[1] != addresses:
            if size in self._lost:
                self._lost[size] += PLAIN_STEP_LOSS
            return False
        found[0].replay()
        self._stats.replays[self._kind] += 1
        return True

    def renew(self) -> None:
        """As `CudaGraphRunner.renew`."""
        self._waiting = capture_order(self.sizes)
        self._lost = dict.fromkeys(self.sizes, 0.0)

    def capture_next(self) -> bool:
        """Capture the size that is wanted most; False when there is nothing left to capture."""
        if self._work_of is None or not self._waiting:
            return False
        size = max(self._waiting, key=self._lost.__getitem__)  # ties: the first
        self._waiting.remove(size)
        before = self._device.used_bytes()
        for work in self._work_of(size):

            def run(work: Work = work) -> tuple[torch.Tensor, ...]:
                work.run()
                return ()

            if self._graphs.pop((work.name, size), None) is not None:  # it is captured again
                self._stats.captured[self._kind] -= 1
            with capturing(f"{work.name} of {size} sequences"):
                graph, _, seconds = self._device.capture(run)
            self._graphs[work.name, size] = graph, work.addresses
            self._stats.captured[self._kind] += 1
            self._stats.capture_seconds += seconds
        if size not in self._captured:
            bisect.insort(self._captured, size)
        self._stats.used_bytes += max(0, self._device.used_bytes() - before)
        return True

    def estimate_parts(self, max_tokens: int, largest_step: int) -> tuple[int, int]:
        """As `CudaGraphRunner.estimate_parts`: what the work frees is less than what the model's steps free."""
        if self._work_of is None or not self.sizes:
            return 0, 0
        return 0, sum(1 for size in self.sizes for _ in self._work_of(size)) * self._device.bytes_per_graph

    @property
    def largest_loss(self) -> float:
        """Steps lost so far by going without the graphs that `capture_next` would capture."""
        return max((self._lost[size] for size in self._waiting), default=0.0)

    @property
    def num_waiting(self) -> int:
        """Sizes still to be captured."""
        return len(self._waiting)

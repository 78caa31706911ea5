"""Replays a model's steps as CUDA graphs: a whole decode step as one graph, or the compiled pieces of any other step one by one.

A full graph holds everything from a step's inputs to its outputs, and what `decode_head` and `decode_tail` add (taking the tokens
sampled last, sampling the next, advancing the inputs). It serves steps in which every sequence has the same small number of tokens
(`query_len`, usually 1), padded to a captured number of sequences with sequences of length 0. A graph bakes in every address and integer
that its kernels were launched with, so it is replayed only where all of them are the captured ones; any other step runs the model as
it is. The attention backends say whether decodes can be captured (`AttentionBackend.decode_capturable`).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from compile_and_serve.compiler.config import CudaGraphMode
from compile_and_serve.compiler.cudagraphs.graph_capture import CAPTURE_STEPS, PLAIN_STEP_LOSS, Graph, GraphDevice, capturing
from compile_and_serve.compiler.cudagraphs.piecewise import (
    PIECEWISE_TOKENS,
    SMALL_LAYERS_TOKENS,
    PiecewiseGraphs,
    max_piecewise_tokens,
    piecewise_unsupported_reason,
)
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.model import Outputs, StepModel
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.step import Step

logger = logging.getLogger(__name__)

ESTIMATED_TOKENS = 8  # of the prompt that an estimate runs, so that it asks for no kernel of long prompts

StepOf = Callable[[int], Step]
DecodeHead = Callable[[Step], None]
DecodeTail = Callable[[Outputs, Step], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. sampled: what `decode_tail` returned, None where the step ran without it. is_capture_due: going without the graph
    of this step's size has cost as much as capturing it. kind: full, piecewise or plain. miss: why it ran without a graph, one word; "": it
    had one, or there are none.
    """

    outputs: Outputs
    sampled: tuple[torch.Tensor, ...] | None = None
    is_capture_due: bool = False
    kind: Literal["full", "piecewise", "plain"] = "plain"
    miss: str = ""


class PlainRunner:
    """Runs every step as it is: the interface of `CudaGraphRunner` without graphs."""

    max_padded_size = 0

    def __init__(self, model: StepModel) -> None:
        self.model = model

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None:
        """None: steps are not padded."""
        return None

    def run(self, step: Step, *, with_sampling: bool = True) -> StepResult:
        return StepResult(self.model(step))


@dataclass(slots=True)
class _FullGraph:
    graph: Graph
    addresses: tuple[int, ...]
    result: StepResult


def default_sizes(max_num_seqs: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ascending sizes with a full graph: 1, 2, 4, then steps of 8, max_num_seqs itself included; or `sizes` up to max_num_seqs."""
    wanted = sizes if sizes is not None else (1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs)
    return tuple(sorted({size for size in wanted if 1 <= size <= max_num_seqs}))


def capture_order(sizes: Sequence[int]) -> list[int]:
    """The order in which sizes are captured: the largest, 1, the powers of 4, the powers of 2, then the others, each downwards.

    A step runs in the smallest captured size that holds it, so a few sizes far apart serve every step from the start.
    """
    powers = [4**i for i in range(12)], [2**i for i in range(24)]
    groups = [max(sizes, default=0)], [1], *powers, sizes
    return list(dict.fromkeys(size for group in groups for size in sorted(group, reverse=True) if size in sizes))


def piecewise_sizes(max_num_seqs: int, sizes: Sequence[int] | None = None, max_tokens: int = PIECEWISE_TOKENS) -> tuple[int, ...]:
    """Ascending sizes of piecewise graphs up to max_tokens or max_num_seqs, each at most an eighth larger than the one before from 64
    tokens on; or `sizes`.
    """
    if sizes is not None:
        return tuple(sorted(set(sizes)))
    wanted, step = [1, 2, 4, *range(8, 64, 8)], 8
    while wanted[-1] < max(max_num_seqs, max_tokens):
        step = 2 * step if wanted[-1] >= 16 * step else step
        wanted.append(wanted[-1] + step)
    return tuple(wanted)


class CudaGraphRunner:
    """A model that replays a graph where it has one for the step, and runs the model where it has none.

    `capture(n)` before serving captures the first n sizes of `capture_order` (largest first, so that all fit into the memory of the
    first); `capture_next()` captures one more while nothing is in flight: in an idle moment, or when a step's result says that it is due.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        mode: CudaGraphMode,
        max_num_seqs: int,
        backends: Sequence[AttentionBackend],
        device: GraphDevice,
        sizes: Sequence[int] | None = None,
        query_len: int = 1,
        max_tokens: int | None = None,
        longest_step: int = SMALL_LAYERS_TOKENS,
        decode_head: DecodeHead | None = None,
        decode_tail: DecodeTail | None = None,
        stats: GraphStats | None = None,
    ) -> None:
        """backends: of the attention groups. sizes: numbers of sequences to capture. query_len: tokens of a sequence in a decode step.
        max_tokens: of a piecewise graph; None: as many as pay. longest_step: tokens of a step that comes often. decode_head, decode_tail:
        what a full graph does before the model runs, and with its outputs. stats: to count in.
        """
        self.model = model
        self.query_len = query_len
        self.stats = stats or GraphStats()
        self._device = device
        self._decode_head = decode_head
        self._decode_tail = decode_tail
        self._decode_step: StepOf | None = None
        self._prompt_step: StepOf | None = None
        self._full: dict[tuple[int, bool], _FullGraph] = {}  # by number of sequences, and whether it samples
        self._captured_sizes: list[int] = []  # ascending, of graphs that sample
        self._lost: dict[tuple[int, bool], float] = {}  # steps lost so far by going without a graph
        self.sizes: tuple[int, ...] = ()
        if mode in ("full", "full_and_piecewise"):
            names = ", ".join(backend.name for backend in backends if not backend.decode_capturable)
            if not names:
                self.sizes = default_sizes(max_num_seqs, sizes)
            else:
                logger.warning("no full CUDA graphs: attention backend %s cannot be captured", names)
        self._waiting = capture_order(self.sizes)
        self._waiting_unsampled: list[int] = []  # sizes that steps without sampling asked for
        self._piecewise: PiecewiseGraphs | None = None
        if mode in ("piecewise", "full_and_piecewise"):
            reason = piecewise_unsupported_reason(model)
            if reason is None:
                wanted = piecewise_sizes(max_num_seqs, sizes if mode == "piecewise" else None, max_piecewise_tokens(model, longest_step))
                if max_tokens is not None:
                    wanted = tuple(sorted({min(size, max_tokens) for size in wanted}))
                self._piecewise = PiecewiseGraphs(model, device, wanted)
            else:
                logger.warning("no piecewise CUDA graphs: %s", reason)

    @property
    def max_padded_size(self) -> int:
        """The largest number of tokens that `padded_size` answers."""
        piecewise = self._piecewise.sizes if self._piecewise else ()
        return max((*(size * self.query_len for size in self.sizes), *piecewise), default=0)

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None:
        """The number of tokens to pad a step to, or None: as it is.

        A decode step is padded with whole sequences to the next captured size (before the first capture, to the next size); any other
        with tokens to the next piecewise size.
        """
        q = self.query_len
        if max_query_len == q and num_seqs * q == num_tokens and self.sizes and num_seqs <= self.sizes[-1]:
            sizes = self._captured_sizes or self.sizes  # the largest is captured first
            return sizes[bisect.bisect_left(sizes, num_seqs)] * q
        return None if self._piecewise is None else self._piecewise.padded_size(num_tokens)

    def bind(self, decode_step: StepOf | None, prompt_step: StepOf | None = None) -> None:
        """Say where decode steps lie: decode_step(n) fills the persistent buffers with n padding sequences. To be called before anything
        is captured: graphs read and write these buffers.

        prompt_step(n): a made-up step of n tokens of a prompt, for estimates. None: nowhere, as before the first call.
        """
        assert not self._full, "graphs of other buffers are captured already"
        self._decode_step = decode_step
        self._prompt_step = prompt_step

    def capture(self, count: int | None = None) -> int:
        """Capture up to `count` full graphs (None: all); → how many."""
        done = 0
        while (count is None or done < count) and self.capture_next():
            done += 1
        return done

    def capture_next(self) -> bool:
        """Capture the graph that is wanted most; False when there is nothing left to capture."""
        if self._decode_step is None or not (self._waiting or self._waiting_unsampled):
            return False
        if self._waiting_unsampled:
            self._capture_full(self._waiting_unsampled.pop(0), with_sampling=False)
            return True
        size = max(self._waiting, key=lambda size: self._lost.get((size, True), 0.0))  # ties: the first
        self._waiting.remove(size)
        self._capture_full(size, with_sampling=True)
        if size not in self._captured_sizes:
            bisect.insort(self._captured_sizes, size)
        return True

    def renew(self) -> None:
        """Have every graph captured again, as kernels have changed. Until its turn comes, a graph is replayed as it is."""
        self._waiting = capture_order(self.sizes)
        self._waiting_unsampled = sorted(size for size, samples in self._full if not samples)
        self._lost.clear()
        if self._piecewise is not None:
            self._piecewise.renew()

    def _capture_full(self, size: int, *, with_sampling: bool) -> None:
        assert self._decode_step is not None
        if self._full.pop((size, with_sampling), None) is not None:  # it is captured again: the memory of two is not there
            self.stats.captured["full"] -= 1
        before = self._device.used_bytes()
        step = self._decode_step(size)
        names: list[str] = []

        def work() -> tuple[torch.Tensor, ...]:
            if self._decode_head is not None:
                self._decode_head(step)
            outputs = self.model(step)
            names[:] = outputs
            tail = self._decode_tail if with_sampling else None
            return *outputs.values(), *(tail(outputs, step) if tail else ())

        with capturing(f"{size} decodes"):
            graph, tensors, seconds = self._device.capture(work)
        sampled = tensors[len(names) :] if with_sampling and self._decode_tail else None
        result = StepResult(dict(zip(names, tensors, strict=False)), sampled, kind="full")
        self._full[size, with_sampling] = _FullGraph(graph, step.addresses, result)
        stats = self.stats
        stats.captured["full"] += 1
        stats.capture_seconds += seconds
        stats.used_bytes += max(0, self._device.used_bytes() - before)

    def capture_pieces_up_to(self, max_tokens: int | None) -> None:
        """See `PiecewiseGraphs.limit`."""
        if self._piecewise is not None:
            self._piecewise.limit(max_tokens)

    def next_piecewise_size(self) -> int | None:
        """The piecewise size to capture next, largest first; None when all are. The next step of that size captures it."""
        return None if self._piecewise is None else self._piecewise.want_next()

    def want_octaves(self) -> list[int]:
        """See `PiecewiseGraphs.want_octaves`."""
        return [] if self._piecewise is None else self._piecewise.want_octaves()

    def estimate_bytes(self, max_tokens: int, largest_step: int) -> int:
        """Device memory that the graphs of steps of up to max_tokens tokens will take. largest_step: bytes of a step of max_tokens."""
        self.stats.estimated_bytes = sum(self.estimate_parts(max_tokens, largest_step))
        return self.stats.estimated_bytes

    def estimate_parts(self, max_tokens: int, largest_step: int) -> tuple[int, int]:
        """`estimate_bytes` in two parts: what a step frees, which the graphs of all sizes share, and what they keep for themselves.

        From a plain run of the largest decode step, and, for piecewise graphs, from one of a few tokens: everything is proportional.
        """
        peaks, kept_by_graphs = [0], 0
        if self._decode_step is not None and self.sizes:
            step = self._decode_step(self.sizes[-1])
            peaks.append(self._device.peak_bytes(lambda: self._run_plain(step)))
            kept_by_graphs += len(self.sizes) * self._device.bytes_per_graph
        piecewise = self._piecewise
        if piecewise is not None and self._prompt_step is not None:
            sizes = [size for size in piecewise.sizes if size <= max_tokens]
            if sizes:
                peaks.append(largest_step * sizes[-1] // max_tokens)
                few = min(sizes, key=lambda size: abs(size - ESTIMATED_TOKENS))
                kept = piecewise.kept_bytes(self._prompt_step(few))
                kept_by_graphs += sum(kept * size // few + self._device.bytes_per_graph for size in sizes)
        return max(peaks), kept_by_graphs

    def _run_plain(self, step: Step) -> None:
        self.model(step)

    def run(self, step: Step, *, with_sampling: bool = True) -> StepResult:
        """Run a step. with_sampling: False where something must come between the outputs and sampling, which the caller then does."""
        num_seqs, is_capture_due, miss = step.padded_seqs, False, "size" if self.sizes or self._piecewise is not None else ""
        is_decode = step.max_query_len == self.query_len and num_seqs * self.query_len == step.padded_tokens == step.num_rows
        pieces = self._piecewise
        if pieces is not None and step.padded_tokens > pieces.sizes[-1]:
            pieces = None
        if is_decode and self.sizes and num_seqs <= self.sizes[-1]:
            full = self._full.get((num_seqs, with_sampling))
            is_replay = full is not None and full.addresses == step.addresses
            miss = "addresses" if full is not None else "not_captured" if with_sampling else "unsampled"
            if full is None and not with_sampling and num_seqs not in self._waiting_unsampled:
                self._waiting_unsampled.append(num_seqs)
            if self._full:  # losses are ignored until the first graph exists
                is_capture_due = self._note_loss(step, is_replay, with_sampling)
            if full is not None and is_replay:
                full.graph.replay()
                self.stats.replays["full"] += 1
                return replace(full.result, is_capture_due=True) if is_capture_due else full.result
            # Decodes beside prompts of one token have the shape of decodes, but lie elsewhere. Nothing is captured twice.
            if full is None and pieces is not None and step.padded_tokens not in pieces:
                pieces = None
        elif pieces is not None:
            miss = "not_captured"
        if pieces is not None:
            outputs = pieces.run(step, self.stats)
            if outputs is not None:
                return StepResult(outputs, is_capture_due=is_capture_due, kind="piecewise")
        self.stats.plain_steps += 1
        return StepResult(self.model(step), is_capture_due=is_capture_due, miss=miss)

    def _note_loss(self, step: Step, is_replay: bool, with_sampling: bool) -> bool:
        """Count what a decode step loses without a graph of its own size; → whether capturing that is due."""
        if with_sampling:
            size, waiting = self.sizes[bisect.bisect_left(self.sizes, step.num_seqs)], self._waiting
        else:
            size, waiting = step.padded_seqs, self._waiting_unsampled
        if size not in waiting:
            return False
        key, before = (size, with_sampling), self._lost.get((size, with_sampling), 0.0)
        self._lost[key] = before + (min(step.padded_seqs / size - 1, PLAIN_STEP_LOSS) if is_replay else PLAIN_STEP_LOSS)
        return self._lost[key] >= CAPTURE_STEPS

    @property
    def largest_loss(self) -> float:
        """Steps lost so far by going without the graph that `capture_next` would capture."""
        return max((self._lost.get((size, True), 0.0) for size in self._waiting), default=0.0)

    @property
    def num_waiting(self) -> int:
        """Full graphs still to be captured."""
        return len(self._waiting)

    @property
    def num_piecewise_waiting(self) -> int:
        """Sizes whose piecewise graphs `next_piecewise_size` has not named yet."""
        return 0 if self._piecewise is None else self._piecewise.num_wanted

    def captured_graph(self, num_seqs: int) -> Graph | None:
        """The full graph that a step of num_seqs decodes replays (to time it by itself); None where there is none."""
        size = self.padded_size(num_seqs * self.query_len, num_seqs, self.query_len)
        full = None if size is None else self._full.get((size // self.query_len, True))
        return None if full is None else full.graph

    def report(self) -> dict[str, Any]:
        """Counts and sizes for a start-up log line or a metrics page."""
        stats = self.stats
        return {
            "full_graphs": stats.captured["full"],
            "piecewise_graphs": stats.captured["piecewise"],
            "waiting": self.num_waiting,
            "capture_seconds": round(stats.capture_seconds, 3),
            "estimated_bytes": stats.estimated_bytes,
            "used_bytes": stats.used_bytes,
            "replays": dict(stats.replays),
            "plain_steps": stats.plain_steps,
        }

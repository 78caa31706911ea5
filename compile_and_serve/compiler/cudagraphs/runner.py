"""Replays a model's steps as CUDA graphs: a whole decode step as one graph, or the compiled pieces of any other step one by one.

A full graph holds everything from the token ids to the logits, and what `decode_head` and `decode_tail` add (taking the last tokens,
choosing the next, advancing the step).
It is valid for steps of exactly one token a sequence, padded to a captured size with sequences of length 0. A graph bakes in every
address and integer that its kernels were launched with, so a replay happens only where all of them are the captured ones; anything else
runs the model as it is. A backend that sets `decode_capturable` says that its decodes read all lengths from the device, and take
nothing from `plan` or from the metadata's integers.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from compile_and_serve.compiler.config import CudaGraphMode
from compile_and_serve.compiler.cudagraphs.graph_capture import Graph, GraphDevice, capturing
from compile_and_serve.compiler.cudagraphs.piecewise import (
    PIECEWISE_TOKENS,
    PiecewiseGraphs,
    most_piecewise_tokens,
    piecewise_unsupported_reason,
)
from compile_and_serve.custom_ops.attention.attention import AttentionMetadata, attention_metadata, current_metadata

logger = logging.getLogger(__name__)

ESTIMATED_TOKENS = 8  # of the prompt that an estimate runs: kernels for long ones are not asked for during start-up


class StepModel(Protocol):
    """`model(input_ids [T], positions [T], kv_caches, logits_indices [S])` → logits [S, V]."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """What a step of decodes knows of its S rows besides the model's inputs.

    sampling: what tokens are chosen with, each [S]. slots: int64 [S], places in last_tokens: int64, of all running requests. has_run:
    int32 [S], 1 where a step has run with these inputs, which are then to be advanced first.
    """

    sampling: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    last_tokens: torch.Tensor
    has_run: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """A step's arguments in the buffers that every later step of that size uses too."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_caches: Sequence[torch.Tensor]
    logits_indices: torch.Tensor
    metadata: AttentionMetadata
    rows: DecodeRows | None = None  # of a step of decodes, for `decode_head` and `decode_tail`

    def addresses(self) -> tuple[int, ...]:
        """What a graph that read these tensors bakes in."""
        m = self.metadata
        tensors = (
            self.input_ids,
            self.positions,
            self.logits_indices,
            m.query_start_loc,
            m.seq_lens,
            m.block_table,
            m.slot_mapping,
        )
        return (
            *(t.data_ptr() for t in tensors),
            m.block_table.stride(0),
            self.kv_caches[0].data_ptr() if self.kv_caches else 0,
        )


InputsOf = Callable[[int], StepInputs]
DecodeHead = Callable[[StepInputs], None]
DecodeTail = Callable[[torch.Tensor, StepInputs], tuple[torch.Tensor, ...]]


@dataclass(slots=True)
class _FullGraph:
    graph: Graph
    addresses: tuple[int, ...]
    logits: torch.Tensor
    tail: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class GraphStats:
    """Since the start: replays by mode, steps that ran without a graph, and what capturing took."""

    replays: dict[str, int] = field(default_factory=lambda: {"full": 0, "piecewise": 0})
    plain_steps: int = 0
    captured: dict[str, int] = field(default_factory=lambda: {"full": 0, "piecewise": 0})
    capture_seconds: float = 0.0
    estimated_bytes: int = 0
    used_bytes: int = 0


def default_sizes(max_num_seqs: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ascending sizes with a full graph: 1, 2, 4, then steps of 8, max_num_seqs itself included; or `sizes` up to max_num_seqs."""
    wanted = sizes if sizes is not None else (1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs)
    return tuple(sorted({size for size in wanted if 1 <= size <= max_num_seqs}))


def piecewise_sizes(
    max_num_seqs: int, sizes: Sequence[int] | None = None, most_tokens: int = PIECEWISE_TOKENS
) -> tuple[int, ...]:
    """Ascending sizes of piecewise graphs up to most_tokens or max_num_seqs, each at most an eighth larger than the one before from 64
    tokens on; or `sizes`.
    """
    if sizes is not None:
        return tuple(sorted(set(sizes)))
    wanted, step = [1, 2, 4, *range(8, 64, 8)], 8
    while wanted[-1] < max(max_num_seqs, most_tokens):
        step = 2 * step if wanted[-1] >= 16 * step else step
        wanted.append(wanted[-1] + step)
    return tuple(wanted)


class CudaGraphRunner:
    """A model that replays graphs where it has one for the step, and runs the model where it has not.

    `capture(n)` before serving captures the n sizes that matter most (largest first, so that all fit into the memory of the first);
    `capture_next()` captures one more and is meant for idle moments: nothing may be in flight.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        mode: CudaGraphMode,
        max_num_seqs: int,
        backend: object,
        device: GraphDevice,
        sizes: Sequence[int] | None = None,
        decode_head: DecodeHead | None = None,
        decode_tail: DecodeTail | None = None,
    ) -> None:
        """decode_head, decode_tail: what a full graph does before the model runs, and with its logits."""
        self.model = model
        self.stats = GraphStats()
        self.tail: tuple[torch.Tensor, ...] | None = None  # what decode_tail returned in the step just replayed
        self.is_missed = False  # the step just run was one of decodes that a graph is yet to be captured for
        self._device = device
        self._decode_head = decode_head
        self._decode_tail = decode_tail
        self._decode_inputs: InputsOf | None = None
        self._prompt_inputs: InputsOf | None = None
        self._full: dict[int, _FullGraph] = {}
        self._asked: dict[int, int] = {}
        self.sizes: tuple[int, ...] = ()
        if mode in ("full", "full_and_piecewise"):
            if getattr(backend, "decode_capturable", False):
                self.sizes = default_sizes(max_num_seqs, sizes)
            else:
                logger.warning(
                    "no full CUDA graphs: attention backend %s cannot be captured",
                    getattr(backend, "name", type(backend).__name__),
                )
        self._waiting = list(self.sizes)
        self._piecewise: PiecewiseGraphs | None = None
        if mode in ("piecewise", "full_and_piecewise"):
            reason = piecewise_unsupported_reason(model)
            if reason is None:
                wanted = piecewise_sizes(
                    max_num_seqs, sizes if mode == "piecewise" else None, most_piecewise_tokens(model)
                )
                self._piecewise = PiecewiseGraphs(model, device, wanted)
            else:
                logger.warning("no piecewise CUDA graphs: %s", reason)

    @property
    def max_padded_size(self) -> int:
        """The largest number of tokens that `padded_size` answers."""
        piecewise = self._piecewise.sizes if self._piecewise else ()
        return max((*self.sizes, *piecewise), default=0)

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None:
        """The number of tokens to pad a step to, or None: as it is.

        A step of decodes (max_query_len 1) is padded with whole sequences to the next full size; any other to the next piecewise size.
        """
        if max_query_len == 1 and num_seqs == num_tokens and self.sizes and num_tokens <= self.sizes[-1]:
            return self.sizes[bisect.bisect_left(self.sizes, num_tokens)]
        if self._piecewise is not None and num_tokens <= self._piecewise.sizes[-1]:
            return self._piecewise.sizes[bisect.bisect_left(self._piecewise.sizes, num_tokens)]
        return None

    def bind(self, decode_inputs: InputsOf | None, prompt_inputs: InputsOf | None = None) -> None:
        """Say where steps of decodes lie: decode_inputs(size) fills the persistent buffers with `size` padding sequences. Before anything
        is captured: graphs read and write these buffers.

        prompt_inputs(size): a made-up step of that many tokens of a prompt, for estimates. None: nowhere, as before the first call.
        """
        assert not self._full, "graphs are captured already, of other buffers"
        self._decode_inputs = decode_inputs
        self._prompt_inputs = prompt_inputs

    def capture(self, count: int | None = None) -> int:
        """Capture up to `count` full graphs (None: all); → how many. The largest comes first, then 1, then the rest downwards."""
        done = 0
        while (count is None or done < count) and self.capture_next():
            done += 1
        return done

    def capture_next(self) -> bool:
        """Capture the graph that is wanted most; False when there is nothing left to capture."""
        if self._decode_inputs is None or not self._waiting:
            return False
        size = self._most_wanted()
        self._waiting.remove(size)
        before = self._device.used_bytes()
        inputs = self._decode_inputs(size)
        inputs = replace(inputs, metadata=replace(inputs.metadata, num_seqs=size, num_tokens=size, max_query_len=1))

        def step() -> tuple[torch.Tensor, ...]:
            if self._decode_head is not None:
                self._decode_head(inputs)
            with attention_metadata(inputs.metadata):
                logits = self.model(inputs.input_ids, inputs.positions, inputs.kv_caches, inputs.logits_indices)
            return logits, *(self._decode_tail(logits, inputs) if self._decode_tail else ())

        with capturing(f"{size} decodes"):
            graph, outputs, seconds = self._device.capture(step)
        self._full[size] = _FullGraph(graph, inputs.addresses(), outputs[0], tuple(outputs[1:]))
        stats = self.stats
        stats.captured["full"] += 1
        stats.capture_seconds += seconds
        stats.used_bytes += max(0, self._device.used_bytes() - before)
        return True

    def capture_pieces_up_to(self, most_tokens: int | None) -> None:
        """Steps of more tokens run without piecewise graphs as long as they have none; None: there is no limit."""
        if self._piecewise is not None:
            self._piecewise.most_tokens = most_tokens

    def next_piecewise_size(self) -> int | None:
        """The piecewise size to capture next, largest first; None when all are. The next step of that size captures it."""
        return None if self._piecewise is None else self._piecewise.want_next()

    def estimate_bytes(self, max_tokens: int, largest_step: int) -> int:
        """Device memory that the graphs of steps of up to max_tokens tokens will take; largest_step: bytes that one of so many takes.

        From a plain run of the largest decode step, and, for piecewise graphs, from one of a few tokens: everything is proportional.
        """
        peaks, kept_by_graphs = [0], 0
        if self._decode_inputs is not None and self.sizes:
            inputs = self._decode_inputs(self.sizes[-1])
            peaks.append(self._device.peak_bytes(lambda: self._run_plain(inputs)))
            kept_by_graphs += len(self.sizes) * self._device.bytes_per_graph
        piecewise = self._piecewise
        if piecewise is not None and self._prompt_inputs is not None:
            sizes = [size for size in piecewise.sizes if size <= max_tokens]
            if sizes:
                peaks.append(largest_step * sizes[-1] // max_tokens)
                few = min(sizes, key=lambda size: abs(size - ESTIMATED_TOKENS))
                prompt = self._prompt_inputs(few)
                with attention_metadata(prompt.metadata):
                    kept = piecewise.kept_bytes(prompt.input_ids, prompt.positions, prompt.kv_caches)
                kept_by_graphs += sum(kept * size // few + self._device.bytes_per_graph for size in sizes)
        self.stats.estimated_bytes = max(peaks) + kept_by_graphs  # what a step frees, the others' graphs use again
        return self.stats.estimated_bytes

    def _run_plain(self, inputs: StepInputs) -> None:
        with attention_metadata(inputs.metadata):
            self.model(inputs.input_ids, inputs.positions, inputs.kv_caches, inputs.logits_indices)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        metadata = current_metadata()
        num_tokens = input_ids.shape[0]
        self.tail, self.is_missed = None, False
        is_decode = metadata.max_query_len == 1 and metadata.seq_lens.shape[0] == num_tokens == logits_indices.shape[0]
        if is_decode and self.sizes and num_tokens <= self.sizes[-1]:
            full = self._full.get(num_tokens)
            if full is not None:
                inputs = StepInputs(
                    input_ids=input_ids,
                    positions=positions,
                    kv_caches=kv_caches,
                    logits_indices=logits_indices,
                    metadata=metadata,
                )
                if full.addresses == inputs.addresses():
                    full.graph.replay()
                    self.stats.replays["full"] += 1
                    self.tail = full.tail
                    return full.logits
            self.is_missed = num_tokens in self._waiting
            if self._full:  # before, nobody asks: the largest is captured first
                self._asked[num_tokens] = self._asked.get(num_tokens, 0) + 1
        elif self._piecewise is not None and num_tokens <= self._piecewise.sizes[-1]:
            logits = self._piecewise.run(input_ids, positions, kv_caches, logits_indices, self.stats)
            if logits is not None:
                return logits
        self.stats.plain_steps += 1
        return self.model(input_ids, positions, kv_caches, logits_indices)

    def captured_graph(self, num_seqs: int) -> Graph | None:
        """The full graph that a step of num_seqs decodes replays (to time it by itself); None where there is none."""
        size = self.padded_size(num_seqs, num_seqs, 1)
        return self._full[size].graph if size in self._full else None

    def _most_wanted(self) -> int:
        asked = [size for size in self._waiting if size in self._asked]
        if asked:
            return max(asked, key=lambda size: (self._asked[size], size))
        if not self._full:
            return max(self._waiting)
        return 1 if 1 in self._waiting else max(self._waiting)

    def report(self) -> dict[str, Any]:
        """Counts and sizes for a start-up log line or a metrics page."""
        stats = self.stats
        return {
            "full_graphs": stats.captured["full"],
            "piecewise_graphs": stats.captured["piecewise"],
            "waiting": len(self._waiting),
            "capture_seconds": round(stats.capture_seconds, 3),
            "estimated_bytes": stats.estimated_bytes,
            "used_bytes": stats.used_bytes,
            "replays": dict(stats.replays),
            "plain_steps": stats.plain_steps,
        }

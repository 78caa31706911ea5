"""Piecewise CUDA graphs: each compiled piece of a step is a graph of its own, the ops between them run as they are.

For a padded token count, every piece is captured on static inputs; the output of an op between pieces is copied into the
static input of the next piece. Memory is that of one layer, not of all: a value's memory is free for later pieces once its
last reader is captured. The pieces that depend on `logits_indices` (their number of rows changes from step to step) run
without a graph.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_and_serve.compiler.cudagraphs.graph_capture import GraphDevice, capturing
from compile_and_serve.compiler.pieces.plan import REF, OpStep, PieceStep
from compile_and_serve.compiler.pieces.stitch import _overload

if TYPE_CHECKING:
    from compile_and_serve.compiler.cudagraphs.runner import GraphStats

PIECEWISE_TOKENS = 2048  # a longer step keeps the device busy for longer than the host needs to launch it
SMALL_LAYERS_TOKENS = 4096  # the same where a layer has few weights:
# With 4096 tokens 0.25 TFLOP, which a large GPU computes faster than the host launches a layer.
SMALL_LAYER_WEIGHTS = 30_000_000
ASKED_BEFORE_CAPTURE = 3  # a size is captured once this many steps came with it: a capture costs several steps


def piecewise_unsupported_reason(model: object) -> str | None:
    """None when the model can be replayed piece by piece, else one sentence why not."""
    if not all(hasattr(model, name) for name in ("plan", "pieces", "weights")):
        return "the model is not compiled into pieces"
    return None


def most_piecewise_tokens(model: Any) -> int:
    """Tokens of the longest step worth replaying piece by piece; decided by the weights that a compiled model's pieces read."""
    weights = [
        sum(model.weights[name.removeprefix("weight.")].numel() for name in step.inputs if name.startswith("weight."))
        for step in model.plan.steps
        if isinstance(step, PieceStep)
    ]
    is_small = weights and statistics.median(weights) <= SMALL_LAYER_WEIGHTS
    return SMALL_LAYERS_TOKENS if is_small else PIECEWISE_TOKENS


@dataclass(slots=True)
class _Captured:
    """Static inputs, then what to do in order, then the values that the uncaptured rest reads."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    actions: list[Callable[[], None]]
    values: dict[str, Any]
    cache_address: int


class PiecewiseGraphs:
    """Captures sizes as steps ask for them, and replays them."""

    def __init__(self, model: Any, device: GraphDevice, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._model = model
        self._device = device
        self._captured: dict[int, _Captured] = {}
        self._asked: dict[int, int] = {}
        self._wanted = list(sizes)
        self.most_tokens: int | None = None  # of a size that may be captured now; None: any

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        logits_indices: torch.Tensor,
        stats: GraphStats,
    ) -> torch.Tensor | None:
        """The step's logits, or None where it has to run without graphs (its size is not captured, or not padded to a size)."""
        size = input_ids.shape[0]
        if self.sizes[bisect.bisect_left(self.sizes, size)] != size:
            return None
        captured = self._captured.get(size)
        if captured is None or captured.cache_address != kv_caches[0].data_ptr():
            self._asked[size] = self._asked.get(size, 0) + 1
            may_capture = self.most_tokens is None or size <= self.most_tokens
            if not may_capture or self._asked[size] < ASKED_BEFORE_CAPTURE:
                return None
            started = time.perf_counter()
            before = self._device.used_bytes()
            with capturing(f"a step of {size} tokens, piece by piece,"):
                captured = self._captured[size] = self._capture(input_ids, positions, kv_caches, stats)
            stats.capture_seconds += time.perf_counter() - started
            stats.used_bytes += max(0, self._device.used_bytes() - before)
        captured.input_ids.copy_(input_ids)
        captured.positions.copy_(positions)
        for action in captured.actions:
            action()
        values = dict(captured.values, logits_indices=logits_indices)
        for step in self._rest():
            _run_step(step, values, self._model.pieces)
        stats.replays["piecewise"] += 1
        return values[self._model.plan.result]

    def want_next(self) -> int | None:
        """The largest size without graphs, to be captured by the next step of that size; each is wanted once, then None."""
        while self._wanted:
            size = self._wanted.pop()
            if size not in self._captured:
                self._asked[size] = ASKED_BEFORE_CAPTURE
                return size
        return None

    def kept_bytes(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: Sequence[torch.Tensor]) -> int:
        """What the graphs of a step of this size keep for themselves, by one run without graphs: the static inputs, the outputs of ops
        and the values that the uncaptured rest reads. Everything else lies in memory that all sizes share.
        """
        plan, pieces = self._model.plan, self._model.pieces
        values = self._inputs(input_ids, positions, kv_caches)
        kept = input_ids.nbytes + positions.nbytes
        shared: set[tuple[torch.Size, torch.dtype]] = set()
        last_use = {name: index for index, step in enumerate(plan.steps) for name in _reads(step)}
        for index, step in enumerate(self._covered()):
            _run_step(step, values, pieces)
            if isinstance(step, OpStep):
                output = values[step.output]
                key = (output.shape, output.dtype)
                if last_use.get(step.output) != index + 1 or key not in shared:
                    kept += output.nbytes
                if last_use.get(step.output) == index + 1:
                    shared.add(key)
            for name in _reads(step):
                if last_use[name] == index and name.startswith("v"):
                    values.pop(name, None)
        ops = {step.output for step in self._covered() if isinstance(step, OpStep)}
        return kept + sum(value.nbytes for name, value in values.items() if name.startswith("v") and name not in ops)

    def _inputs(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        values: dict[str, Any] = {"input_ids": input_ids, "positions": positions}
        values |= {f"kv_cache.{i}": cache for i, cache in enumerate(kv_caches)}
        return values | {f"weight.{name}": weight for name, weight in self._model.weights.items()}

    def _covered(self) -> list[PieceStep | OpStep]:
        """The steps that run as graphs, and the ops between them."""
        steps = self._model.plan.steps
        return list(steps[: len(steps) - len(self._rest())])

    def _rest(self) -> list[PieceStep | OpStep]:
        """The steps from the first that reads logits_indices on."""
        steps = self._model.plan.steps
        first = next((i for i, step in enumerate(steps) if "logits_indices" in _reads(step)), len(steps))
        return list(steps[first:])

    def _capture(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: Sequence[torch.Tensor], stats: GraphStats
    ) -> _Captured:
        plan, pieces = self._model.plan, self._model.pieces
        static_ids, static_positions = input_ids.clone(), positions.clone()
        values = self._inputs(static_ids, static_positions, kv_caches)
        actions: list[Callable[[], None]] = []
        buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        last_use = {name: index for index, step in enumerate(plan.steps) for name in _reads(step)}
        for index, step in enumerate(self._covered()):
            if isinstance(step, PieceStep):
                piece, inputs = pieces[step.piece], [values[name] for name in step.inputs]
                graph, outputs, _ = self._device.capture(_call(piece, inputs), keep_outputs=True)
                stats.captured["piecewise"] += 1
                values |= dict(zip(step.outputs, outputs, strict=True))
                graph.replay()  # the op that follows reads real values while the rest is captured
                actions.append(graph.replay)
            else:
                op, arguments = _overload(step), [_value(argument, values) for argument in step.arguments]
                output = op(*arguments)
                if last_use.get(step.output) == index + 1:  # read by the next piece alone: layers share one buffer
                    output = buffers.setdefault((output.shape, output.dtype), output).copy_(output)
                values[step.output] = output
                # Not owned: what a piece returned may be overwritten by pieces that are replayed after this op.
                held = [
                    self._borrowed(argument, value) for argument, value in zip(step.arguments, arguments, strict=True)
                ]
                actions.append(_copy_action(output, op, held))
            for name in _reads(step):
                if last_use[name] == index and name.startswith("v"):
                    values.pop(name, None)  # its memory is free for the pieces that are captured next
        return _Captured(static_ids, static_positions, actions, values, kv_caches[0].data_ptr())

    def _borrowed(self, argument: Any, value: Any) -> Any:
        computed = isinstance(argument, str) and argument.startswith(f"{REF}v")
        return self._device.borrow(value) if computed else value


def _call(piece: Callable[..., Any], inputs: list[Any]) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: tuple(piece(list(inputs)))  # a piece empties the list that it is given


def _copy_action(output: torch.Tensor, op: Callable[..., torch.Tensor], arguments: list[Any]) -> Callable[[], None]:
    def run() -> None:
        output.copy_(op(*arguments))

    return run


def _run_step(step: PieceStep | OpStep, values: dict[str, Any], pieces: Any) -> None:
    if isinstance(step, PieceStep):
        values |= dict(zip(step.outputs, pieces[step.piece]([values[name] for name in step.inputs]), strict=True))
    else:
        values[step.output] = _overload(step)(*[_value(argument, values) for argument in step.arguments])


def _reads(step: PieceStep | OpStep) -> list[str]:
    if isinstance(step, PieceStep):
        return list(step.inputs)
    return [a.removeprefix(REF) for a in step.arguments if isinstance(a, str) and a.startswith(REF)]


def _value(argument: Any, values: dict[str, Any]) -> Any:
    return values[argument.removeprefix(REF)] if isinstance(argument, str) and argument.startswith(REF) else argument

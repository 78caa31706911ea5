"""Piecewise CUDA graphs: each compiled piece of the plan has a graph of its own; the ops between pieces run without graphs.

For a padded token count, every piece is captured on static inputs; the outputs of an op between pieces are copied into the
static inputs of the next piece. Memory is that of one layer, not of all: a value's memory is free for later pieces once its
last reader is captured. The end of the plan, from the first piece or op that reads an input of "rows", has no graphs, because the
number of rows changes from step to step.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_and_serve.compiler.cudagraphs.graph_capture import CAPTURE_STEPS, PLAIN_STEP_LOSS, GraphDevice, capturing
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.pieces.plan import WEIGHT, ExecutionPlan, OpStep, PieceStep, reads
from compile_and_serve.compiler.pieces.plan_function import StepCall, is_computed, make_plan_function, step_calls
from compile_and_serve.custom_ops.step import ROWS, Step, running

# In a longer step, the device takes longer to compute than the host to launch, so that graphs gain nothing.
PIECEWISE_TOKENS = 2048
SMALL_LAYERS_TOKENS = 4096  # where pieces have at most SMALL_LAYER_WEIGHTS weights; with half as many, twice as long steps gain
# Steps lost by a size above the limit before it is captured nevertheless: the kernels of such steps are chosen while the engine is idle,
# and an engine that never is would launch them kernel by kernel for ever.
UNLIMITED_STEPS = 8 * CAPTURE_STEPS
# 0.25 TFLOP for 4096 tokens: a large GPU computes this faster than the host launches it.
SMALL_LAYER_WEIGHTS = 30_000_000

Outputs = dict[str, torch.Tensor]


def piecewise_unsupported_reason(model: object) -> str | None:
    """None when the model can be replayed piece by piece, else one sentence why not."""
    if not all(hasattr(model, name) for name in ("plan", "pieces", "inputs", "weights")):
        return "the model is not compiled into pieces"
    return None


def max_piecewise_tokens(model: Any, longest: int = SMALL_LAYERS_TOKENS) -> int:
    """Tokens of the longest step worth replaying piece by piece; decided by the weights that a compiled model's pieces read. longest: of a
    step that comes often.
    """
    weights = [
        sum(model.weights[name.removeprefix(WEIGHT)].numel() for name in step.inputs if name.startswith(WEIGHT))
        for step in model.plan.steps
        if isinstance(step, PieceStep)
    ]
    tokens = PIECEWISE_TOKENS
    while weights and tokens < longest and 2 * tokens * statistics.median(weights) <= SMALL_LAYERS_TOKENS * SMALL_LAYER_WEIGHTS:
        tokens *= 2
    return tokens


@dataclass(slots=True)
class _Captured:
    """inputs: static copies by name. actions: in order. values: what the steps without graphs read."""

    inputs: dict[str, torch.Tensor]
    actions: list[Callable[[], None]]
    values: dict[str, torch.Tensor]
    state_address: int


class PiecewiseGraphs:
    """Captures graphs of a size once enough steps have come with it, and replays them.

    Sizes an octave apart come first: each serves the steps between it and its half until their own sizes have become due.
    """

    def __init__(self, model: Any, device: GraphDevice, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.max_tokens: int | None = None  # of a size whose kernels are chosen; None: all are
        self._provisional: set[int] = set()  # sizes captured above the limit
        self._outdated: set[int] = set()  # sizes whose graphs have kernels that are not chosen any more, until they are captured again
        self._model = model
        self._device = device
        self._captured: dict[int, _Captured] = {}
        self._lost: dict[int, float] = {}  # steps lost so far by going without the graphs of a size
        self._wanted = list(sizes)
        plan: ExecutionPlan = model.plan
        of_rows = {one.name for one in model.inputs if one.length == ROWS}
        first = next((i for i, step in enumerate(plan.steps) if of_rows & set(reads(step))), len(plan.steps))
        self._head, self._tail = plan.cut(first)
        self._static = [one.name for one in model.inputs if one.name in self._head.arguments]
        self._run_tail: Any = None

    def limit(self, max_tokens: int | None) -> None:
        """Capture no size above max_tokens (None: all may be), unless steps without it have lost UNLIMITED_STEPS. Once the limit reaches
        such a size, `want_next` names it, to be captured again with the kernels that are chosen then.
        """
        self.max_tokens = max_tokens
        self._outdate([size for size in self._provisional if max_tokens is None or size <= max_tokens])

    def renew(self) -> None:
        """Have all sizes captured again, as kernels have changed: `want_next` names them."""
        self._outdate(list(self._captured))

    def _outdate(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._provisional.discard(size)
            self._outdated.add(size)
            self._lost.pop(size, None)
            if size not in self._wanted:
                bisect.insort(self._wanted, size)

    def __contains__(self, size: int) -> bool:
        """Whether steps of this size have graphs."""
        return size in self._captured

    def padded_size(self, num_tokens: int) -> int | None:
        """The number of tokens to pad a step to: the next size; until that is captured, a captured one of up to twice as many, or the
        octave that is due. None: the step is too long.
        """
        if num_tokens > self.sizes[-1]:
            return None
        size = self.sizes[bisect.bisect_left(self.sizes, num_tokens)]
        if size in self._captured or self._is_due(size):
            return size
        octave = self._octave(size)
        default = octave if self._is_due(octave) else size
        return min((other for other in self._captured if size < other <= 2 * size), default=default)

    def _octave(self, size: int) -> int:
        """The size to capture first for steps of `size`: the largest size, halved as long as it is at least `size`."""
        octave = self.sizes[-1] if self.max_tokens is None else max(size, min(self.sizes[-1], self.max_tokens))
        while octave // 2 >= size:
            octave //= 2
        return octave if octave in self.sizes else size

    def _is_due(self, size: int) -> bool:
        is_limited = self.max_tokens is not None and size > self.max_tokens
        return self._lost.get(size, 0.0) >= (UNLIMITED_STEPS if is_limited else CAPTURE_STEPS)

    def run(self, step: Step, stats: GraphStats) -> Outputs | None:
        """→ the step's outputs; None if it has to run without graphs: its size is not captured yet, or it is not padded to a size."""
        size = step.padded_tokens
        if self.sizes[bisect.bisect_left(self.sizes, size)] != size:
            return None
        captured = self._captured.get(size)
        if size in self._outdated and self._is_due(size):
            self._outdated.discard(size)
            captured = None
            del self._captured[size]
        if captured is not None and captured.state_address != _state_address(step):
            captured = None
        own_size = self.sizes[bisect.bisect_left(self.sizes, step.num_tokens)]
        if captured is None or own_size not in self._captured:
            wanted, lost = (self._octave(own_size), PLAIN_STEP_LOSS) if captured is None else (own_size, size / own_size - 1)
            self._lost[wanted] = self._lost.get(wanted, 0.0) + lost
        if captured is None:
            if not self._is_due(size):
                return None
            started = time.perf_counter()
            before = self._device.used_bytes()
            with capturing(f"a step of {size} tokens, piece by piece,"):
                captured = self._captured[size] = self._capture(step, stats)
            if self.max_tokens is not None and size > self.max_tokens:
                self._provisional.add(size)
            stats.capture_seconds += time.perf_counter() - started
            stats.used_bytes += max(0, self._device.used_bytes() - before)
        for name, static in captured.inputs.items():
            static.copy_(step.inputs[name])
        if self._run_tail is None:
            calls = step_calls(self._tail, self._model.pieces)
            self._run_tail = make_plan_function(self._tail, calls, self._model.weights)
        with running(step.metadata):
            for action in captured.actions:
                action()
            results = self._run_tail({**step.values, **captured.values})
        stats.replays["piecewise"] += 1
        return dict(zip(self._tail.outputs, results, strict=True))

    def want_next(self) -> int | None:
        """The largest size without graphs, to be captured by the next step of that size; each is wanted once, then None."""
        while self._wanted:
            size = self._wanted.pop()
            if size not in self._captured or size in self._outdated:
                self._lost[size] = CAPTURE_STEPS
                return size
        return None

    def want_octaves(self) -> list[int]:
        """Sizes from the largest down, each half of the one before, to be captured by the next steps of these sizes, whatever the limit:
        together they serve every step.
        """
        octaves, size = [], self.sizes[-1]
        while size in self.sizes:
            octaves.append(size)
            self._lost[size] = UNLIMITED_STEPS
            size //= 2
        return octaves

    @property
    def num_wanted(self) -> int:
        """Sizes that `want_next` has not named yet."""
        return len(self._wanted)

    def kept_bytes(self, step: Step) -> int:
        """What the graphs of a step of this size keep for themselves, by one run without graphs: the static inputs, the outputs of ops
        and the values that the steps without graphs read. Everything else lies in memory that all sizes share.
        """
        kept = sum(step.inputs[name].nbytes for name in self._static)
        shared: set[tuple[torch.Size, torch.dtype]] = set()

        def counted(call: StepCall, index: int, op: OpStep) -> StepCall:
            def run(*arguments: Any) -> torch.Tensor:
                nonlocal kept
                output = call(*arguments)
                key = (output.shape, output.dtype)
                is_shared = self._is_read_next(op.output, index)
                if not is_shared or key not in shared:
                    kept += output.nbytes
                if is_shared:
                    shared.add(key)
                return output

            return run

        calls = [
            counted(call, index, one) if isinstance(one, OpStep) else call
            for index, (call, one) in enumerate(zip(step_calls(self._head, self._model.pieces), self._head.steps, strict=True))
        ]
        with running(step.metadata):
            results = make_plan_function(self._head, calls, self._model.weights)(step.values)
        of_ops = {one.output for one in self._head.steps if isinstance(one, OpStep)}
        live = zip(self._head.results, results, strict=True)
        return kept + sum(value.nbytes for name, value in live if name not in of_ops)

    def _is_read_next(self, name: str, index: int) -> bool:
        """Whether only the step after step `index` reads a value: layers then share one buffer for it."""
        return self._head.last_use.get(name) == index + 1

    def _capture(self, step: Step, stats: GraphStats) -> _Captured:
        inputs = {name: step.inputs[name].clone() for name in self._static}
        actions: list[Callable[[], None]] = []
        buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

        def captured_piece(piece: StepCall) -> StepCall:
            def run(arguments: list[Any]) -> tuple[torch.Tensor, ...]:
                held = list(arguments)  # a piece empties the list that it is given
                graph, outputs, _ = self._device.capture(lambda: tuple(piece(list(held))), keep_outputs=True)
                stats.captured["piecewise"] += 1
                graph.replay()  # the op that follows reads real values while the rest is captured
                actions.append(graph.replay)
                return outputs

            return run

        def copied_op(op: StepCall, index: int, one: OpStep) -> StepCall:
            def run(*arguments: Any) -> torch.Tensor:
                output = op(*arguments)
                if self._is_read_next(one.output, index):
                    output = buffers.setdefault((output.shape, output.dtype), output).copy_(output)
                # Not owned: pieces that are replayed after this op may overwrite what a piece returned.
                held = [
                    self._device.borrow(value) if is_computed(argument) else value
                    for argument, value in zip(one.arguments, arguments, strict=True)
                ]
                actions.append(_copy_action(output, op, held))
                return output

            return run

        calls = [
            captured_piece(call) if isinstance(one, PieceStep) else copied_op(call, index, one)
            for index, (call, one) in enumerate(zip(step_calls(self._head, self._model.pieces), self._head.steps, strict=True))
        ]
        with running(step.metadata):
            results = make_plan_function(self._head, calls, self._model.weights)({**step.state, **inputs})
        values = {**dict(zip(self._head.results, results, strict=True)), **inputs}
        return _Captured(inputs, actions, values, _state_address(step))


def _state_address(step: Step) -> int:
    first = next(iter(step.state.values()), None)
    return 0 if first is None else first.data_ptr()


def _copy_action(output: torch.Tensor, op: StepCall, arguments: list[Any]) -> Callable[[], None]:
    def run() -> None:
        output.copy_(op(*arguments))

    return run

"""Measures a fused op of ours against Inductor's code for the same ops, on this device, once for each shape.

Inductor is hard to beat at plain row-wise work, and which of the two is faster differs between devices. A pass that would replace such
work asks here: each is compiled as a piece of its own, with a symbolic number of tokens, and timed at `TOKENS`. In a model, the ops
around the site are linears and attention, which Inductor cannot fuse with, so that it loses nothing in a piece of its own. The outcome
is kept in the tuner's store, under the toolchain, our sources and the shapes.

Shape legend: T tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule

from compile_and_serve.compiler.artifacts.cache_key import compiler_sources, toolchain_fields
from compile_and_serve.compiler.artifacts.work_folder import WorkFolder
from compile_and_serve.compiler.compat import FakeTensorMode
from compile_and_serve.compiler.inductor import PieceCallable, compile_piece
from compile_and_serve.compiler.rewrite.fusion_choice import TOKENS, FusionChoice, mean_ratio
from compile_and_serve.custom_ops.jit.sources import digest
from compile_and_serve.custom_ops.tuning.timer import call_seconds
from compile_and_serve.custom_ops.tuning.tuner import Measurement, Problem, Tuner, device_name

log = logging.getLogger(__name__)

OURS, INDUCTOR = "ours", "inductor"
MARGIN = 0.02  # a fused op has to be faster by this much
ROUNDS = 15
GRAPH_CALLS = 20  # calls in one CUDA graph

Function = Callable[..., tuple[torch.Tensor, ...]]


class Autotuner:
    """The `FusionTuner` of one compilation. folders: of the tuner's store. forced: passes that fuse without a measurement."""

    def __init__(
        self,
        device: torch.device,
        folders: Sequence[Path],
        forced: frozenset[str] = frozenset(),
        before_measuring: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self._forced = device, forced
        self._tuner = Tuner(device_name(device), folders)
        self._before_measuring = before_measuring
        self._chosen: dict[str, FusionChoice] = {}

    def choose(self, pass_name: str, ours: Function, plain: Function, tensors: Sequence[torch.Tensor], *constants: float) -> FusionChoice:
        """As `FusionTuner.choose`."""
        if pass_name in self._forced:
            return FusionChoice(use_ours=True)
        shapes = [
            f"{str(t.dtype).removeprefix('torch.')}{['T' if isinstance(size, torch.SymInt) else size for size in t.shape]}" for t in tensors
        ]
        toolchain = digest(json.dumps(toolchain_fields(self._device), sort_keys=True), compiler_sources())
        name = f"{pass_name} {', '.join(map(str, (*shapes, *constants)))} at {TOKENS} tokens, toolchain {toolchain}"
        if name in self._chosen:
            return self._chosen[name]
        functions = {INDUCTOR: plain, OURS: ours}

        def time() -> Measurement:
            return self._measure(functions.values(), tensors, constants)

        try:
            measured = self._tuner.measure(Problem(kind="fused_op", name=name), functions.keys(), time)
            assert measured is not None
            ours_seconds, inductor = (tuple(measured.seconds[candidate]) for candidate in (OURS, INDUCTOR))
            is_faster = mean_ratio(ours_seconds, inductor) < 1 - MARGIN
            choice = FusionChoice(use_ours=is_faster, ours=ours_seconds, inductor=inductor)
        except Exception as error:  # of torch, Triton or the C++ compiler: a measurement is no reason not to serve
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("%s could not be measured: %s", pass_name, reason, exc_info=log.isEnabledFor(logging.DEBUG))
            choice = FusionChoice(use_ours=False, failure=reason)
        self._chosen[name] = choice
        log.info("%s of %s: %s", pass_name, ", ".join(shapes), choice.sentence())
        return choice

    def _measure(self, functions: Iterable[Function], tensors: Sequence[torch.Tensor], constants: Sequence[float]) -> Measurement:
        self._before_measuring()
        with WorkFolder("compile-and-serve-choice-") as folder:
            runs = [
                compile_piece(_graph_of(function, tensors, constants), self._device, Path(folder) / str(number)).run
                for number, function in enumerate(functions)
            ]
            by_size = [self._seconds(runs, tensors, num_tokens) for num_tokens in TOKENS]
        inductor, ours = zip(*by_size, strict=True)
        return Measurement(seconds={INDUCTOR: inductor, OURS: ours})

    def _seconds(self, runs: Sequence[PieceCallable], tensors: Sequence[torch.Tensor], num_tokens: int) -> list[float]:
        """Seconds of one call of each with T = num_tokens: the least of the rounds."""
        generator = torch.Generator(self._device).manual_seed(0)  # the global one's numbers must not depend on measurements
        values = [
            torch.randn([num_tokens if isinstance(s, torch.SymInt) else s for s in t.shape], device=self._device, generator=generator).to(
                t.dtype
            )
            for t in tensors
        ]
        lengths = [num_tokens] if any(isinstance(t.shape[0], torch.SymInt) for t in tensors) else []
        calls = [lambda number, run=run: run([*lengths, *values]) for run in runs]
        rounds = call_seconds(calls, self._device, num_calls=GRAPH_CALLS, num_rounds=ROUNDS)
        return [min(seconds) for seconds in rounds]


def _graph_of(function: Function, tensors: Sequence[torch.Tensor], constants: Sequence[float]) -> GraphModule:
    """A piece that calls the function: its length first, then the tensors, contiguous."""
    graph = Graph()
    nodes = []
    lengths = {str(size): size for t in tensors for size in t.shape if isinstance(size, torch.SymInt)}
    assert len(lengths) <= 1, "a choice between functions of more than one symbolic length"
    for size in lengths.values():
        graph.placeholder("tokens").meta["example_value"] = size
    for i, tensor in enumerate(tensors):
        node = graph.placeholder(f"arg{i}")
        mode = getattr(tensor, "fake_mode", None) or FakeTensorMode()
        with mode:
            node.meta["example_value"] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        nodes.append(node)
    graph.output(graph.call_function(function, (*nodes, *constants)))
    return GraphModule({}, graph)

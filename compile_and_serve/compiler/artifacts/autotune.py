"""Measured choice: an op of ours against what Inductor makes of the same ops, on this device, once for each shape.

Inductor is hard to beat at plain row-wise work, and which of the two is faster differs from device to device. So a pass that would
take such work from it asks here: both are compiled as a piece of their own, with a symbolic number of tokens, and timed at `TOKENS`.
Around the site stand calls that Inductor does not look into (linears, attention), so that it has nothing else to fuse with. The
outcome is kept in the artifact store under the device, the versions and the shapes.

Shape legend: T tokens.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from compile_and_serve.compiler.artifacts.cache_key import kernel_sources, toolchain_fields
from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.compiler.compat import FakeTensorMode
from compile_and_serve.compiler.inductor import PieceCallable, compile_piece
from compile_and_serve.compiler.rewrite.fusion_choice import TOKENS, FusionChoice, mean_ratio

log = logging.getLogger(__name__)

KIND, FILE = "choice", "choice.json"  # in the artifact store
MARGIN = 0.02  # a fusion has to be faster by this much to be worth its op
ROUNDS, SAMPLE_SECONDS = 15, 2e-4  # timings of each, alternating; a shorter call is repeated up to this time
GRAPH_CALLS = 20  # calls in one CUDA graph: the kernels' time counts, not the launches'

Function = Callable[..., tuple[torch.Tensor, ...]]


class Autotuner:
    """Chooses for one compilation; `forced` passes are used without measuring."""

    def __init__(
        self, device: torch.device, stores: Sequence[ArtifactStore], forced: frozenset[str] = frozenset(),
        before_measuring: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._device, self._stores, self._forced = device, stores, forced
        self._before_measuring = before_measuring
        self._known: dict[str, FusionChoice] = {}

    def choose(
        self, pass_name: str, ours: Function, plain: Function, tensors: Sequence[torch.Tensor], *constants: float
    ) -> FusionChoice:
        """Which of two functions of (*tensors, *constants) is faster. Both return a tuple of tensors.

        tensors: fakes; a symbolic first dimension is T, all else is fixed.
        """
        if pass_name in self._forced:
            return FusionChoice(use_ours=True)
        shapes = [
            f"{str(t.dtype).removeprefix('torch.')}{['T' if isinstance(size, torch.SymInt) else size for size in t.shape]}"
            for t in tensors
        ]
        fields = {**toolchain_fields(self._device), "pass": pass_name, "arguments": [*shapes, *constants], "tokens": TOKENS,
                  "sources": kernel_sources()}  # fmt: skip
        key = json.dumps(fields["arguments"]) + pass_name
        if key not in self._known:
            try:
                self._known[key] = self._stored(fields) or self._measured(fields, ours, plain, tensors, constants)
            except Exception as error:  # of torch, Triton or the C++ compiler: a measurement is no reason not to serve
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                log.warning("%s could not be measured: %s", pass_name, reason, exc_info=log.isEnabledFor(logging.DEBUG))
                self._known[key] = FusionChoice(use_ours=False, failure=reason)
            log.info("%s of %s: %s", pass_name, ", ".join(shapes), self._known[key].sentence())
        return self._known[key]

    def _stored(self, fields: dict[str, Any]) -> FusionChoice | None:
        for store in self._stores:
            if entry := store.get(KIND, fields):
                found = json.loads((entry.path / FILE).read_text())
                return FusionChoice(
                    use_ours=found["use_ours"], ours=tuple(found["ours"]), inductor=tuple(found["inductor"])
                )
        return None

    def _measured(
        self, fields: dict[str, Any], ours: Function, plain: Function, tensors: Sequence[torch.Tensor],
        constants: Sequence[float],
    ) -> FusionChoice:  # fmt: skip
        self._before_measuring()
        with tempfile.TemporaryDirectory(prefix="compile-and-serve-choice-", ignore_cleanup_errors=True) as folder:
            runs = [
                compile_piece(_graph_of(function, tensors, constants), self._device, Path(folder) / name).run
                for name, function in (("ours", ours), ("plain", plain))
            ]
            times = [self._times(runs, tensors, count) for count in TOKENS]
        seconds, inductor = tuple(t[0] for t in times), tuple(t[1] for t in times)
        choice = FusionChoice(use_ours=mean_ratio(seconds, inductor) < 1 - MARGIN, ours=seconds, inductor=inductor)
        if self._stores:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / FILE).write_text(json.dumps(asdict(choice)))
                self._stores[-1].put(KIND, fields, Path(folder))
        return choice

    def _times(self, runs: Sequence[PieceCallable], tensors: Sequence[torch.Tensor], count: int) -> list[float]:
        """Seconds of one call of each at T = count: the least of several, taken in turns."""
        draws = torch.Generator(self._device).manual_seed(0)  # nobody else's draws are to depend on what is measured
        values = [
            torch.randn(
                [count if isinstance(s, torch.SymInt) else s for s in t.shape], device=self._device, generator=draws
            ).to(t.dtype)
            for t in tensors
        ]
        lengths = [count] if any(isinstance(t.shape[0], torch.SymInt) for t in tensors) else []
        calls = [lambda run=run: run([*lengths, *values]) for run in runs]
        return _cuda_times(calls) if self._device.type == "cuda" else _cpu_times(calls)


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


def _cpu_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, math.ceil(SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7))))
    best = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(repeats[i]):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / repeats[i])
    return best


def _cuda_times(calls: Sequence[Callable[[], object]]) -> list[float]:
    graphs = [_captured(call) for call in calls]
    best = [math.inf] * len(calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(ROUNDS):
        for i, graph in enumerate(graphs):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best[i] = min(best[i], start.elapsed_time(end) / 1e3 / GRAPH_CALLS)
    return best


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # kernels are built at the first call
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_CALLS):
            call()
    graph.replay()
    return graph

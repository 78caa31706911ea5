"""`--profile-pieces`: how long each distinct piece and split op takes on this device, and how near that is to what it can do.

A decode step (one token for each of T sequences that have `CONTEXT` tokens in the cache) runs with every layer's weights in
place, so that a piece finds its weights where it finds them in service: not in a cache that the layer before has filled with the
same numbers. Bytes and FLOPs are counted from the graph; bandwidth and matrix rate are measured first.

Shape legend: T tokens (= sequences), I input features, O output features, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.pieces.plan import REF, ExecutionPlan, OpStep, PieceStep, PlanStep
from compile_and_serve.compiler.pieces.plan_function import make_plan_function, step_calls
from compile_and_serve.compiler.rewrite.graph_pass import op_arguments
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.library import op_info
from compile_and_serve.custom_ops.linear.fused_linear import fused_linear, pack_linear_weight
from compile_and_serve.custom_ops.moe.expert_load import counting_experts
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import TimedEvent
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import StepInput, running
from compile_and_serve.custom_ops.weight_functions import TensorSpec

CONTEXT, PAGE_TOKENS = 512, 16
CACHE_BYTES = 1 << 30  # of all layers' caches together; beyond it layers share
MAX_RANDOM = 1 << 28  # elements of a weight
RUNS = 12  # steps that are measured
BUDGET_SECONDS = 3.0  # after which no further step, nor another run of anything else that is measured, begins
CPU_STREAM_BYTES, STREAM_BYTES = 1 << 28, 1 << 31  # of the array whose bandwidth is measured
CPU_GEMM_SIZE, GEMM_SIZE = 1536, 8192
_FREE = (
    F.embedding,
    operator.getitem,
    torch.reshape,
    torch.unsqueeze,
    torch.squeeze,
    torch.flatten,
    torch.unflatten,
    torch.split,
    torch.chunk,
    torch.transpose,
    torch.permute,
    torch.Tensor.view,
    torch.Tensor.expand,
    torch.Tensor.to,
)


def profile_model(
    plan: ExecutionPlan,
    graphs: Mapping[str, GraphModule],
    pieces: Mapping[str, Callable[..., Any]],
    inputs: Sequence[StepInput],
    groups: Sequence[StateGroup],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    backends: Mapping[str, AttentionBackend],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """Measure a model's steps with T tokens each.

    inputs, groups: of a step. backends: by attention group. → {"bandwidth": bytes/s, "gemm_rate": FLOP/s, "rows": one for each
    distinct piece or op and T (seconds, bytes and FLOPs of one use), "steps": one for each T (seconds of the step, and of what lies
    between pieces and ops), "experts": one for each T of a model with experts (`_DecodeStep.expert_load`)}
    """
    weights = {t.target: _dummy_weight(t.spec, device) for t in plan.transforms}
    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "context": CONTEXT,
        "bandwidth": measure_bandwidth(device),
        "gemm_rate": measure_gemm_rate(device, dtype),
        "rows": [],
        "steps": [],
        "experts": [],
    }
    for count in tokens:
        step = _DecodeStep(plan, pieces, weights, inputs, groups, device, kv_cache_dtype, backends, count)
        seconds, whole = step.measure()
        used = sum(sum(times) for times in seconds.values())
        if (load := step.expert_load()) is not None:
            result["experts"].append({"tokens": count, **load})
        result["steps"].append({"tokens": count, "seconds": whole, "between": max(0.0, whole - used)})
        for key, times in seconds.items():
            result["rows"].append(
                {
                    "name": f"piece {plan.pieces.index(key)}" if key in graphs else key.split("::")[-1],
                    "count": len(times),
                    "tokens": count,
                    "seconds": statistics.mean(times),
                    **(piece_work(graphs[key], count) if key in graphs else step.op_work(key)),
                }
            )
    return result


def _dummy_weight(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Random values for floating matrices up to `MAX_RANDOM`, so that tokens go to different experts; the same value otherwise."""
    is_matrix = len(spec.shape) > 1 and torch.Size(spec.shape).numel() <= MAX_RANDOM
    if spec.dtype in (torch.float32, torch.float16, torch.bfloat16) and is_matrix:
        return torch.empty(spec.shape, dtype=spec.dtype, device=device).normal_(0.0, 0.02)
    return torch.full(spec.shape, 0.01, device=device).to(spec.dtype)


def _vocabulary(weights: Mapping[str, torch.Tensor]) -> int:
    """A number of token ids that every embedding has."""
    rows = [weight.shape[0] for name, weight in weights.items() if "embed_tokens" in name and weight.dim() == 2]
    return min(rows, default=2)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading memory (a sum) or of copying it, whichever is faster."""
    num_bytes = CPU_STREAM_BYTES if platform_of(device).shares_host_memory else STREAM_BYTES
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = _best(lambda: source.sum(), device)
    copy = _best(lambda: target.copy_(source), device)
    return max(source.nbytes / read, 2 * source.nbytes / copy)


def measure_gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, torch's or our linear's, whichever is faster."""
    size = CPU_GEMM_SIZE if platform_of(device).shares_host_memory else GEMM_SIZE
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right = torch.full((size, size), 0.5, dtype=dtype, device=device)
    packed = pack_linear_weight(right)
    seconds = min(_best(lambda: left @ right, device), _best(lambda: fused_linear(left, packed, size), device))
    return 2 * size**3 / seconds


def piece_work(gm: GraphModule, tokens: int) -> dict[str, int]:
    """{"bytes", "flops"} of one run of a piece: its inputs and outputs once each, and its calls, with T for every symbol."""
    output = next(iter(reversed(gm.graph.nodes)))
    placeholders = gm.graph.find_nodes(op="placeholder")
    moved = sum(_input_bytes(node, tokens) for node in placeholders)
    moved += sum(_bytes(node.meta["example_value"], tokens) for node in output.args[0] if isinstance(node, Node))
    return {"bytes": moved, "flops": sum(_flops(node, tokens) for node in gm.graph.nodes if node.op == "call_function")}


class _DecodeStep:
    """One decode step's values, and the timing of its parts."""

    def __init__(
        self,
        plan: ExecutionPlan,
        pieces: Mapping[str, Callable[..., Any]],
        weights: Mapping[str, torch.Tensor],
        inputs: Sequence[StepInput],
        groups: Sequence[StateGroup],
        device: torch.device,
        kv_cache_dtype: torch.dtype,
        backends: Mapping[str, AttentionBackend],
        tokens: int,
    ) -> None:
        self._plan, self._device, self._tokens = plan, device, tokens
        state = _state(groups, tokens, kv_cache_dtype, device)
        self._state_bytes = {name: size for group in groups for name, size in group.bytes_read(CONTEXT, kv_cache_dtype).items()}
        self._step = make_step(
            inputs,
            groups,
            [(CONTEXT - 1, 1)] * tokens,
            state=state,
            tokens_per_page={group.name: PAGE_TOKENS for group in groups},
            backends=backends,
            device=device,
            token_ids=np.arange(tokens) % _vocabulary(weights),
        )
        calls = step_calls(plan, pieces)
        self._clock = Clock(device)
        self._op_work: dict[str, dict[str, int]] = {}
        self._whole = make_plan_function(plan, calls, weights)
        timed = [self._timed(call, step) for call, step in zip(calls, plan.steps, strict=True)]
        self._parts = make_plan_function(plan, timed, weights)

    def measure(self) -> tuple[dict[str, list[float]], float]:
        """(piece or op → seconds of each of its uses, seconds of the whole step), each the fastest of the runs: what else
        the machine does only ever adds, and to a whole step more often than to a part of it.
        """
        runs: list[list[float]] = []
        wholes: list[float] = []
        with running(self._step.metadata), torch.no_grad():
            for _ in range(2):
                self._time_parts()
            started = time.perf_counter()
            while len(runs) < RUNS and (not runs or time.perf_counter() - started < BUDGET_SECONDS):
                runs.append(self._time_parts())
                wholes.append(self._time_whole())
        seconds: dict[str, list[float]] = defaultdict(list)
        for step, times in zip(self._plan.steps, zip(*runs, strict=True), strict=True):
            seconds[_key(step)].append(min(times))
        return seconds, min(wholes)

    def expert_load(self) -> dict[str, Any] | None:
        """How one step with random weights loads the experts; None for a model without experts.

        "layers", "experts": their numbers. "distinct": experts of a layer that have a token. "largest": tokens of a layer's busiest expert
        over those of its average expert. Both are means over the layers.
        """
        with running(self._step.metadata), torch.no_grad(), counting_experts() as loads:
            self._whole(self._step.values)
        layers = list(loads.values())
        if not layers:
            return None
        counts = torch.stack([layer.tokens for layer in layers]).double().cpu()
        return {
            "layers": len(layers),
            "experts": counts.shape[1],
            "distinct": (counts > 0).sum(1).double().mean().item(),
            "largest": (counts.amax(1) / counts.mean(1)).mean().item(),
        }

    def _timed(self, call: Callable[..., Any], step: PlanStep) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._clock.start()
            returned = call(*arguments)
            self._clock.stop()
            if isinstance(step, OpStep) and step.op not in self._op_work:
                self._op_work[step.op] = self._work(step, arguments, returned)
            return returned

        return run

    def _time_parts(self) -> list[float]:
        self._clock = Clock(self._device)
        self._parts(self._step.values)
        return self._clock.seconds()

    def _time_whole(self) -> float:
        clock = Clock(self._device)
        clock.start()
        self._whole(self._step.values)
        clock.stop()
        return clock.seconds()[0]

    def op_work(self, op: str) -> dict[str, int]:
        """{"bytes", "flops"} of one use of a split op, as it ran last."""
        return self._op_work[op]

    def _work(self, step: OpStep, arguments: Sequence[Any], output: torch.Tensor) -> dict[str, int]:
        """What the op reads and writes besides its state, and the state of CONTEXT tokens of each sequence."""
        moved, flops = output.nbytes, 0
        for name, value in zip(step.arguments, arguments, strict=True):
            if not isinstance(value, torch.Tensor):
                continue
            state_bytes = self._state_bytes.get(str(name).removeprefix(REF))
            if state_bytes is None:
                moved += value.nbytes
            else:
                moved += self._tokens * state_bytes
                flops = 4 * CONTEXT * output.numel()
        return {"bytes": moved, "flops": flops}


def _state(groups: Sequence[StateGroup], tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """State of `tokens` sequences, at most CACHE_BYTES of it: beyond that layers share tensors."""
    pages = tokens * (CONTEXT // PAGE_TOKENS)
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    for group in groups:
        layout = group.layout(PAGE_TOKENS, dtype)
        tensors |= layout.column_tensors(device)
        needed = max(pages, tokens * layout.pages_per_slot + 1)
        shapes += [(name, (needed, *placed.shape), placed.dtype) for name, placed in layout.tensors.items()]
    total = sum(torch.Size(shape).numel() * kind.itemsize for _, shape, kind in shapes)
    distinct = max(1, len(shapes) * CACHE_BYTES // max(total, CACHE_BYTES))
    for number, (name, shape, kind) in enumerate(shapes):
        same = shared[shape, kind]
        if number >= distinct and same:
            tensors[name] = same[number % len(same)]
            continue
        tensors[name] = torch.full(shape, 0.01, dtype=kind, device=device)
        same.append(tensors[name])
    return tensors


class Clock:
    """Seconds of stretches of work."""

    def __init__(self, device: torch.device) -> None:
        self._platform = platform_of(device)
        self._marks: list[TimedEvent] = []

    def start(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def _mark(self) -> None:
        self._marks.append(self._platform.record_timed_event())

    def seconds(self) -> list[float]:
        """Of each stretch, in order; waits for the device."""
        self._platform.synchronize()
        return [stop.seconds_since(start) for start, stop in zip(self._marks[::2], self._marks[1::2], strict=True)]


def _best(work: Callable[[], object], device: torch.device, runs: int = 20) -> float:
    times: list[float] = []
    until = time.perf_counter() + BUDGET_SECONDS
    for _ in range(runs):
        if times and time.perf_counter() > until:
            break
        clock = Clock(device)
        clock.start()
        work()
        clock.stop()
        times += clock.seconds()
    return min(times)


def _key(step: PlanStep) -> str:
    return step.piece if isinstance(step, PieceStep) else step.op


def _sizes(value: Any, tokens: int) -> torch.Size:
    return torch.Size([tokens if isinstance(size, torch.SymInt) else size for size in value.shape])


def _bytes(value: Any, tokens: int) -> int:
    return _sizes(value, tokens).numel() * value.itemsize if isinstance(value, torch.Tensor) else 0


def _input_bytes(node: Node, tokens: int) -> int:
    """Bytes that a piece reads of an input: all of it, or less where it is used for nothing else than looking up rows of an embedding, or
    by ops that read a share (`OpInfo.read_shares`).
    """
    value = node.meta["example_value"]
    if value.dim() == 2 and node.users and all(user.target is F.embedding for user in node.users):
        return tokens * value.shape[1] * value.itemsize
    return int(_bytes(value, tokens) * max((_read_share(user, node, tokens) for user in node.users), default=1.0))


def _read_share(user: Node, source: Node, tokens: int) -> float:
    info = op_info(user.target)
    if info is None or info.read_shares is None:
        return 1.0
    shares = info.read_shares(*_meta_arguments(user, tokens))
    return max(shares.get(name, 1.0) for name, value in op_arguments(user).items() if value is source)


def _flops(node: Node, tokens: int) -> int:
    """2·T·I·O of a matrix product, one for each element of anything else (views and lookups cost none)."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return 0
    out = _sizes(value, tokens).numel()
    if node.target in (F.linear, torch.matmul, torch.mm):
        assert isinstance(node.args[0], Node)
        return 2 * out * _sizes(node.args[0].meta["example_value"], tokens)[-1]
    info = op_info(node.target)
    if info is not None and info.flops is not None:
        return info.flops(*_meta_arguments(node, tokens))
    return 0 if node.target in _FREE else out


def _meta_arguments(node: Node, tokens: int) -> list[Any]:
    """The arguments of an op of ours in its order, with T for every symbol and tensors without data."""

    def concrete(value: Any) -> Any:
        value = value.meta["example_value"] if isinstance(value, Node) else value
        return torch.empty(_sizes(value, tokens), dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value

    return [concrete(value) for value in op_arguments(node).values()]

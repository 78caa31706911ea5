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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.pieces.plan import REF, ExecutionPlan, OpStep, PieceStep, Step
from compile_and_serve.compiler.pieces.stitch import stitch
from compile_and_serve.custom_ops.attention.attention import AttentionBackend, AttentionMetadata, attention_metadata
from compile_and_serve.custom_ops.linear.fused_linear import fused_linear, pack_linear_weight

CONTEXT, BLOCK_SIZE = 512, 16
CACHE_BYTES = 1 << 30  # of all layers' caches together; beyond it layers share
RUNS = 12  # steps that are measured
BUDGET_SECONDS = 3.0  # after which no further step, nor another run of anything else that is measured, begins
STREAM_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
GEMM_SIZE = {"cpu": 1536, "cuda": 8192}
_FREE = (
    F.embedding, operator.getitem, torch.reshape, torch.unsqueeze, torch.squeeze, torch.flatten, torch.unflatten, torch.split,
    torch.chunk, torch.transpose, torch.permute, torch.Tensor.view, torch.Tensor.expand, torch.Tensor.to,
)  # fmt: skip


def profile_model(
    plan: ExecutionPlan,
    graphs: Mapping[str, GraphModule],
    pieces: Mapping[str, Callable[..., Any]],
    cache_shapes: Sequence[tuple[int, int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    backend: AttentionBackend,
    tokens: Sequence[int],
) -> dict[str, Any]:
    """Measure a model's steps with T tokens each.

    cache_shapes: (K, E) of each layer. → {"bandwidth": bytes/s, "gemm_rate": FLOP/s, "rows": one for each distinct piece or op and
    T (seconds, bytes and FLOPs of one use), "steps": one for each T (seconds of the step, and of what lies between pieces and ops)}
    """
    weights = {
        t.target: torch.full(t.spec.shape, 0.01, device=device).to(t.spec.dtype)
        for t in plan.transforms
    }  # fmt: skip
    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "context": CONTEXT,
        "bandwidth": measure_bandwidth(device),
        "gemm_rate": measure_gemm_rate(device, dtype),
        "rows": [],
        "steps": [],
    }
    for count in tokens:
        step = _DecodeStep(plan, pieces, weights, cache_shapes, device, kv_cache_dtype, backend, count)
        seconds, whole = step.measure()
        used = sum(sum(times) for times in seconds.values())
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


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading memory (a sum) or of copying it, whichever is faster."""
    source = torch.ones(STREAM_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = _best(lambda: source.sum(), device)
    copy = _best(lambda: target.copy_(source), device)
    return max(source.nbytes / read, 2 * source.nbytes / copy)


def measure_gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, torch's or our linear's, whichever is faster."""
    size = GEMM_SIZE[device.type]
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
        self, plan: ExecutionPlan, pieces: Mapping[str, Callable[..., Any]], weights: Mapping[str, torch.Tensor],
        cache_shapes: Sequence[tuple[int, int]], device: torch.device, cache_dtype: torch.dtype, backend: AttentionBackend,
        tokens: int,
    ) -> None:  # fmt: skip
        self._plan, self._pieces, self._device = plan, pieces, device
        blocks = CONTEXT // BLOCK_SIZE
        shapes = [(tokens * blocks, 2, heads, BLOCK_SIZE, size) for heads, size in cache_shapes]
        total = sum(torch.Size(shape).numel() * cache_dtype.itemsize for shape in shapes)
        distinct = max(1, len(shapes) * CACHE_BYTES // max(total, CACHE_BYTES))
        caches: list[torch.Tensor] = []
        for i, shape in enumerate(shapes):
            shared = (
                next((c for c in caches[i % distinct :: distinct] if c.shape == shape), None) if i >= distinct else None
            )
            caches.append(torch.full(shape, 0.01, dtype=cache_dtype, device=device) if shared is None else shared)
        self._inputs = (
            torch.arange(tokens, device=device) % 2,
            torch.full((tokens,), CONTEXT - 1, device=device),
            caches,
            torch.arange(tokens, device=device),
        )
        self._values = {f"weight.{name}": tensor for name, tensor in weights.items()}
        self._values |= {f"kv_cache.{i}": cache for i, cache in enumerate(caches)}
        names = ("input_ids", "positions", "logits_indices")
        self._values |= dict(zip(names, (self._inputs[0], self._inputs[1], self._inputs[3]), strict=True))
        self._forward = stitch(plan, pieces, weights)
        self._metadata = self._decode_metadata(backend, tokens, blocks)

    def _decode_metadata(self, backend: AttentionBackend, tokens: int, blocks: int) -> AttentionMetadata:
        starts = torch.arange(tokens + 1, dtype=torch.int32)
        lengths = torch.full((tokens,), CONTEXT, dtype=torch.int32)
        table = torch.arange(tokens * blocks, dtype=torch.int32).view(tokens, blocks)
        slots = table[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
        return AttentionMetadata(
            backend=backend,
            query_start_loc=starts.to(self._device),
            seq_lens=lengths.to(self._device),
            block_table=table.to(self._device),
            slot_mapping=slots.to(self._device),
            num_seqs=tokens,
            num_tokens=tokens,
            max_query_len=1,
            max_seq_len=CONTEXT,
            query_start_loc_cpu=starts.numpy(),
            seq_lens_cpu=lengths.numpy(),
        )

    def measure(self) -> tuple[dict[str, list[float]], float]:
        """(piece or op → seconds of each of its uses, seconds of the whole step), each the fastest of the runs: what else
        the machine does only ever adds, and to a whole step more often than to a part of it.
        """
        runs: list[list[float]] = []
        wholes: list[float] = []
        with attention_metadata(self._metadata), torch.no_grad():
            self._metadata.backend.plan(self._metadata)
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

    def _time_parts(self) -> list[float]:
        clock = _Clock(self._device)
        for step in self._plan.steps:
            arguments = self._arguments(step)
            clock.start()
            if isinstance(step, PieceStep):
                outputs = self._pieces[step.piece](arguments)
            else:
                outputs = [_overload(step)(*arguments)]
            clock.stop()
            names = step.outputs if isinstance(step, PieceStep) else (step.output,)
            self._values |= dict(zip(names, outputs, strict=True))
        return clock.seconds()

    def _time_whole(self) -> float:
        clock = _Clock(self._device)
        clock.start()
        self._forward(*self._inputs)
        clock.stop()
        return clock.seconds()[0]

    def _arguments(self, step: Step) -> list[Any]:
        if isinstance(step, PieceStep):
            return [self._values[name] for name in step.inputs]
        return [
            self._values[a.removeprefix(REF)] if isinstance(a, str) and a.startswith(REF) else a for a in step.arguments
        ]

    def op_work(self, op: str) -> dict[str, int]:
        """{"bytes", "flops"} of one use of a split op: what it reads and writes besides the cache, and the cached keys and values."""
        step = next(s for s in self._plan.steps if isinstance(s, OpStep) and s.op == op)
        tensors = [a for a in self._arguments(step) if isinstance(a, torch.Tensor)]
        output = self._values[step.output]
        moved, flops = output.nbytes, 0
        for tensor in tensors:
            if tensor.dim() == 5:  # the cache: K heads of E, keys and values
                moved += len(output) * CONTEXT * 2 * tensor.shape[2] * tensor.shape[4] * tensor.itemsize
                flops = 4 * CONTEXT * output.numel()
            else:
                moved += tensor.nbytes
        return {"bytes": moved, "flops": flops}


class _Clock:
    """Seconds of stretches of work: on CUDA between events on the stream, elsewhere on the host."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each stretch, in order; waits for the device."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if not self._cuda:
            return [stop - start for start, stop in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


def _best(work: Callable[[], object], device: torch.device, runs: int = 20) -> float:
    times: list[float] = []
    until = time.perf_counter() + BUDGET_SECONDS
    for _ in range(runs):
        if times and time.perf_counter() > until:
            break
        clock = _Clock(device)
        clock.start()
        work()
        clock.stop()
        times += clock.seconds()
    return min(times)


def _key(step: Step) -> str:
    return step.piece if isinstance(step, PieceStep) else step.op


def _overload(step: OpStep) -> Callable[..., Any]:
    namespace, name = step.op.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _sizes(value: Any, tokens: int) -> torch.Size:
    return torch.Size([tokens if isinstance(size, torch.SymInt) else size for size in value.shape])


def _bytes(value: Any, tokens: int) -> int:
    return _sizes(value, tokens).numel() * value.itemsize if isinstance(value, torch.Tensor) else 0


def _input_bytes(node: Node, tokens: int) -> int:
    """Bytes that a piece reads of an input: all of it, or the looked-up rows of an embedding that is used for nothing else."""
    uses = Counter(user.target is F.embedding for user in node.users)
    value = node.meta["example_value"]
    if uses[True] and not uses[False] and value.dim() == 2:
        return tokens * value.shape[1] * value.itemsize
    return _bytes(value, tokens)


def _flops(node: Node, tokens: int) -> int:
    """2·T·I·O of a matrix product, one for each element of anything else (views and lookups cost none)."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return 0
    out = _sizes(value, tokens).numel()
    if node.target in (F.linear, torch.matmul, torch.mm):
        assert isinstance(node.args[0], Node)
        return 2 * out * _sizes(node.args[0].meta["example_value"], tokens)[-1]
    if str(node.target) == "cas.fused_linear.default":
        x = node.args[0]
        assert isinstance(x, Node)
        rows_columns = _sizes(x.meta["example_value"], tokens).numel()
        return 2 * rows_columns * int(node.args[2])  # type: ignore[arg-type]
    return 0 if node.target in _FREE else out

"""CPU ops on their own, with the shapes of SmolLM2-135M: all linears of a step and attention of all layers, against torch and oneDNN.

    python -m benchmarks.ops_cpu [--threads 2] [--tokens 1 16 128 512] [--dtypes bfloat16 float32]

Prints one JSON line per measurement: best time in ms, GB/s of weights (or KV cache) and GFLOP/s. The line "read" is the memory's
own bandwidth at that moment: a sum over as many bytes as the bfloat16 weights have. The ways to compute the same linears take turns, so
that all are measured under the same conditions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.common import cpu_name, environment
from compile_and_serve.compiler.weights.arena import WeightArena
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.attention.cpu_backend import CpuAttention
from compile_and_serve.custom_ops.attention.rope_attention import rope_attention
from compile_and_serve.custom_ops.jit.cpu_kernels import cpu_kernels_status, load_cpu_kernels
from compile_and_serve.custom_ops.linear.fused_linear import fused_linear, pack_linear_weight
from compile_and_serve.custom_ops.quantization import Activations, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.quantized_linear import pack_quantized_weight, quantized_linear
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import running
from compile_and_serve.custom_ops.weight_functions import TensorSpec

CPU = torch.device("cpu")

# SmolLM2-135M: (outputs, inputs) of a layer's linears and of the language-model head.
LAYER_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
NUM_LAYERS = 30
HEAD_SHAPE = (49152, 576)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
ATTENTION_CASES = [(1, 1, 128), (1, 1, 1024), (16, 1, 256), (16, 1, 1024), (1, 512, 512)]  # sequences, query tokens, keys


def best_of_turns(steps: dict[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """Seconds of the fastest call of each step. The steps take turns, for `budget` seconds per step."""
    best, deadline = dict.fromkeys(steps, float("inf")), time.perf_counter() + budget * len(steps)
    turns = 0
    while turns < 3 or time.perf_counter() < deadline:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
        turns += 1
    return best


def best_seconds(step: Callable[[], Any], budget: float) -> float:
    """Seconds of the fastest call, of as many as fit into `budget` seconds and at least 3."""
    step()
    best, calls, deadline = float("inf"), 0, time.perf_counter() + budget
    while calls < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def linear_functions(dtype: torch.dtype, tokens: int) -> dict[str, tuple[Callable, Callable]]:
    """name → (prepare(weight), product(x, prepared weight, number of outputs))."""
    reorder, product = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise

    def quantized(activations: Activations) -> tuple[Callable, Callable]:
        def prepare(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scale = row_scales(weight_OI, torch.int8)
            return pack_quantized_weight(quantize_weight(weight_OI, scale, torch.int8), scale), scale

        return prepare, lambda x, w, outputs: quantized_linear(x, w[0], w[1], outputs, activations=activations)

    return {
        "fused_linear": (pack_linear_weight, fused_linear),
        "quantized_linear int8 weights": quantized("none"),
        "quantized_linear int8 weights and activations": quantized("dynamic"),
        "F.linear": (lambda w: w, lambda x, w, _: F.linear(x, w)),
        "oneDNN packed": (lambda w: reorder(w, tokens), lambda x, w, _: product(x, w, None, "none", [], "")),
    }


def in_huge_pages(prepared: list[Any]) -> list[Any]:
    """Copies of the tensors in one block of memory, as an engine keeps its weights and its KV cache."""
    flat, structure = tree_flatten(prepared)
    arena = WeightArena({str(i): TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for i, t in enumerate(flat)}, CPU)
    return tree_unflatten([arena.tensor(str(i)).copy_(t) for i, t in enumerate(flat)], structure)


def measure_linears(dtype: torch.dtype, tokens: int, budget: float) -> None:
    """All linears of one step, one after another, each with its own weights."""
    shapes = LAYER_SHAPES * NUM_LAYERS + [HEAD_SHAPE]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    inputs = {width: torch.randn(tokens, width).to(dtype) for width in {shape[1] for shape in shapes}}
    num_weights = sum(weight.numel() for weight in weights)
    steps: dict[str, Callable[[], None]] = {}
    num_bytes: dict[str, int] = {}
    for name, (prepare, product) in linear_functions(dtype, tokens).items():
        prepared = [prepare(weight) for weight in weights]
        if name != "oneDNN packed":  # opaque tensors, which cannot be copied
            num_bytes[name] = sum(tensor.nbytes for tensor in tree_flatten(prepared)[0])
            prepared = in_huge_pages(prepared)
        work = [(inputs[shape[1]], weight, shape[0]) for shape, weight in zip(shapes, prepared, strict=True)]

        def step(work: list = work, product: Callable = product) -> None:
            for x, weight, outputs in work:
                product(x, weight, outputs)

        steps[name] = step
    for name, seconds in best_of_turns(steps, budget).items():
        emit(
            op="linears",
            how=name,
            dtype=str(dtype),
            tokens=tokens,
            ms=seconds * 1e3,
            gb_per_s=num_bytes.get(name, num_weights * dtype.itemsize) / seconds / 1e9,
            gflop_per_s=2 * tokens * num_weights / seconds / 1e9,
        )


def make_metadata(backend: AttentionBackend, num_seqs: int, query_len: int, seq_len: int) -> AttentionMetadata:
    """The metadata of `num_seqs` sequences of equal length, in shuffled KV blocks."""
    columns = -(-seq_len // BLOCK_SIZE)
    block_table = torch.randperm(num_seqs * columns).view(num_seqs, columns)
    positions = torch.arange(seq_len - query_len, seq_len)
    slots = block_table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        backend=backend,
        query_start_loc=torch.arange(0, num_seqs * query_len + 1, query_len, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32),
        block_table=block_table.int(),
        slot_mapping=slots.flatten(),
        num_seqs=num_seqs,
        num_tokens=num_seqs * query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
    )


def measure_attention(dtype: torch.dtype, num_seqs: int, query_len: int, seq_len: int, budget: float) -> None:
    """`rope_attention` of all layers, against `scaled_dot_product_attention` alone on contiguous keys and values."""
    tokens = num_seqs * query_len
    blocks = num_seqs * -(-seq_len // BLOCK_SIZE)
    caches = in_huge_pages([torch.randn(blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype) for _ in range(NUM_LAYERS)])
    qkv = torch.randn(tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM).to(dtype)
    angle = torch.rand(tokens, HEAD_DIM)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)

    def paged() -> None:
        for cache in caches:
            rope_attention(qkv, cos, sin, cache, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM**-0.5)

    q = torch.randn(num_seqs, NUM_HEADS, query_len, HEAD_DIM).to(dtype)
    dense = in_huge_pages([torch.randn(2, num_seqs, NUM_KV_HEADS, seq_len, HEAD_DIM).to(dtype) for _ in range(NUM_LAYERS)])

    def contiguous() -> None:
        for k, v in dense:
            F.scaled_dot_product_attention(q, k, v, is_causal=query_len == seq_len, enable_gqa=True)

    kv_bytes = NUM_LAYERS * num_seqs * seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    pairs = num_seqs * sum(range(seq_len - query_len + 1, seq_len + 1))
    with running({KV_CACHES: make_metadata(CpuAttention(), num_seqs, query_len, seq_len)}):
        for name, step in {"rope_attention": paged, "sdpa alone, contiguous": contiguous}.items():
            seconds = best_seconds(step, budget)
            emit(
                op="attention",
                how=name,
                dtype=str(dtype),
                sequences=num_seqs,
                query_len=query_len,
                seq_len=seq_len,
                ms=seconds * 1e3,
                gb_per_s=kv_bytes / seconds / 1e9,
                gflop_per_s=4 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * pairs / seconds / 1e9,
            )


def measure_read(budget: float) -> None:
    """The memory's own bandwidth, the limit of a product with one row: that reads every weight once and does little else."""
    numbers = torch.ones(270 * 2**20 // 8, dtype=torch.int64)
    seconds = best_seconds(numbers.sum, budget)
    emit(op="read", how="sum of int64", ms=seconds * 1e3, gb_per_s=numbers.nbytes / seconds / 1e9)


def emit(**values: Any) -> None:
    """Print one JSON line, with the environment."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps(rounded | CONTEXT), flush=True)


CONTEXT: dict[str, Any] = {}


def main() -> None:
    """Measure what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load_cpu_kernels()
    CONTEXT.update(device=cpu_name(), threads=arguments.threads, kernels=cpu_kernels_status() or "in use", **environment())
    with torch.inference_mode():
        measure_read(arguments.budget)
        for dtype in (getattr(torch, name) for name in arguments.dtypes):
            for tokens in arguments.tokens:
                measure_linears(dtype, tokens, arguments.budget)
            for case in ATTENTION_CASES:
                measure_attention(dtype, *case, arguments.budget)


if __name__ == "__main__":
    main()

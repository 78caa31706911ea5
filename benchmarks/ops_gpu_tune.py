"""Tries configurations of kernels on a GPU: each small-batch linear alone, 17 to 64 tokens, and a whole 1-token step;
a prompt's linears whole and in chunks of tokens; decode attention over sequences of differing lengths. JSON lines.

usage: python -m benchmarks.ops_gpu_tune [--sections sweep,medium,tune,chunks,lengths,long] [--models llama-8b,qwen3-0.6b]
What it finds best is written by hand into `gemv_config`, `small_batch_config`, `decode_config` and `bfloat16_chunk_tokens`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import capture, emit, in_turns_ms, time_ms
from benchmarks.ops_gpu import ARGS, DTYPE, Shape, call_linear, compile_in_parallel, linear_arguments, make_batch, rope_tables, run_sections
from compile_and_serve.custom_ops.attention import triton_decode
from compile_and_serve.custom_ops.attention.triton_rope import split_qkv
from compile_and_serve.custom_ops.linear import triton_linear
from compile_and_serve.custom_ops.linear.silu_mul_gemm import KERNELS, load_silu_mul_gemms, run_silu_mul_gemm, silu_mul_library
from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.linear.triton_linear import fused_linear, gemv, small_batch
from compile_and_serve.custom_ops.linear.triton_linear_configs import SmallBatchConfig
from compile_and_serve.custom_ops.sampling.triton_sampling import greedy_tokens
from compile_and_serve.custom_ops.triton_common import num_sms

DECODE_CONFIGS = [
    (128, 2, 1, 4, 128),
    (128, 16, 1, 4, 128),
    (128, 32, 1, 4, 128),
    (64, 16, 1, 4, 64),
    (64, 8, 1, 2, 64),
    (32, 16, 1, 1, 32),
    (256, 8, 1, 8, 256),
    (64, 8, 2, 4, 64),
]


def sweep_linear(shape: Shape, sweep: bool) -> None:
    """Every configuration of the two small-batch kernels, per linear, over all layers' weights."""
    gemv_configs = [(rows, warps, per_sm, 16) for rows in (2, 4, 8) for warps in (2, 4, 8) for per_sm in (2, 4, 8)]
    batch_configs = [
        SmallBatchConfig(block_o, block_i, splits, stages, 4)
        for block_o, block_i, stages in ((64, 128, 4), (64, 256, 3), (128, 128, 3))
        for splits in (1, 2, 4, 8)
    ]
    for m, kernel, configs in ((1, gemv, gemv_configs), (8, small_batch, batch_configs), (16, small_batch, batch_configs)):
        arguments = {site: linear_arguments(shape, site, m) for site in shape.sites()}
        compile_in_parallel(
            [
                lambda s=site, c=config: call_linear(kernel, shape, 0, s, arguments[s], config=c)  # type: ignore[misc]
                for site in arguments
                for config in configs
            ]
        )
        for site, a in arguments.items():
            size = shape.weights[0][site].numel() * 2 * shape.layers
            results = []
            for config in configs:

                def run(site: str = site, a: dict[str, Any] = a, config: tuple[int, ...] = config) -> None:
                    for layer in range(shape.layers):
                        call_linear(kernel, shape, layer, site, a, config=config)

                try:
                    ms = time_ms(run, 15.0)
                except Exception as error:
                    emit(work="sweep_failed", config=config, error=repr(error)[:200])
                    continue
                results.append((round(ms * 1e3 / shape.layers, 2), config))
            results.sort(key=lambda r: r[0])
            emit(
                work="sweep_linear",
                model=shape.name,
                site=site,
                tokens=m,
                us=results[:6],
                tb_s=round(size / results[0][0] / shape.layers / 1e6, 2),
                worst=results[-1],
            )


def section_medium(shape: Shape, sweep: bool) -> None:
    """17 … 64 tokens: the library GEMM between elementwise kernels, against the tensor-core kernel with its epilogues."""
    for m in (32, 64):
        for site in shape.sites():
            a = linear_arguments(shape, site, m)

            def library(site: str = site, a: dict[str, Any] = a) -> None:
                for layer in range(shape.layers):
                    call_linear(fused_linear, shape, layer, site, a)

            def ours(config: SmallBatchConfig, site: str = site, a: dict[str, Any] = a) -> None:
                for layer, w in enumerate(shape.weights):
                    x = rms_norm(a["x"], w[a["norm_name"]], shape.eps) if a["norm"] else a["x"]
                    call_linear(small_batch, shape, layer, site, a | {"x": x, "norm": False}, config=config)

            configs = [
                SmallBatchConfig(o, i, s, n, w)
                for o, i, n, w in ((64, 128, 4, 4), (64, 256, 3, 4), (128, 128, 3, 4), (128, 64, 4, 4))
                for s in (1, 2, 4)
            ]
            compile_in_parallel([lambda c=c: ours(c) for c in configs])  # type: ignore[misc]
            results = []
            for config in configs:
                try:
                    results.append((round(time_ms(lambda c=config: ours(c), 15.0) * 1e3 / shape.layers, 2), config))  # type: ignore[misc]
                except Exception as error:
                    emit(work="sweep_failed", config=config, error=repr(error)[:200])
            baseline = round(time_ms(library, 15.0) * 1e3 / shape.layers, 2)
            emit(work="medium_linear", model=shape.name, tokens=m, site=site, library_us=baseline, best=sorted(results)[:3])


def hand_step(shape: Shape, length: int = 192) -> Callable[[], None]:
    """A whole step of one token made by hand of the kernels."""
    scale = shape.head_dim**-0.5
    metadata, caches = make_batch(shape, [1], [length], None, shape.layers)
    ids = torch.randint(0, shape.vocab, (1,), device="cuda")
    cos, sin = (table[length - 1 : length] for table in rope_tables(8192, shape.head_dim))

    def attend(qkv: torch.Tensor, w: dict[str, Any], cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty(1, shape.heads, shape.head_dim, dtype=DTYPE, device="cuda")
        q, k, v = split_qkv(qkv, shape.heads, shape.kv_heads)
        triton_decode.decode_attention(
            q, k, v, cos, sin, cache, scale, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
            metadata.slot_mapping, out, 1, w["q_norm"], w["k_norm"], shape.eps,
        )  # fmt: skip
        return out.flatten(1)

    def step() -> None:
        h = F.embedding(ids, shape.embedding)
        for w, cache in zip(shape.weights, caches, strict=True):
            out = attend(fused_linear(h, w["qkv"], shape.qkv_rows, w["norm1"], shape.eps), w, cache)
            h = fused_linear(out, w["o"], shape.hidden, residual_TO=h)
            inner = fused_linear(h, w["gate_up"], 2 * shape.inner, w["norm2"], shape.eps, silu_mul=True)
            h = fused_linear(inner, w["down"], shape.hidden, residual_TO=h)
        greedy_tokens(fused_linear(h, shape.lm_head, shape.vocab, shape.final_norm, shape.eps))

    return step


def section_tune(shape: Shape, sweep: bool) -> None:
    """The 1-token step under other configurations of its kernels, changed one site at a time from the best so far."""
    q_size = shape.heads * shape.head_dim
    sites = {
        "qkv": (shape.qkv_rows, shape.hidden, False),
        "o": (shape.hidden, q_size, False),
        "gate_up": (shape.inner, shape.hidden, True),
        "down": (shape.hidden, shape.inner, False),
        "lm_head": (shape.vocab, shape.hidden, False),
    }
    chosen: dict[tuple[int, int, bool], tuple[int, int, int, int]] = {key: triton_linear.gemv_config(*key) for key in sites.values()}
    saved = triton_linear.gemv_config, triton_decode.decode_config
    decode = [saved[1](1, shape.kv_heads, 132)]
    triton_linear.gemv_config = lambda *key: chosen[key]
    triton_decode.decode_config = lambda *_: decode[0]
    step = hand_step(shape)

    def measure() -> float:
        return time_ms(step, 25.0)

    try:
        shapes = list(itertools.product((2, 4, 8), (4, 8)))
        x = {i: torch.randn(1, i, device="cuda").to(DTYPE) for i in (shape.hidden, shape.inner, q_size)}
        w = shape.weights[0]
        compile_in_parallel(
            [
                lambda c=(*rw, 3, 16): (  # type: ignore[misc]
                    gemv(x[shape.hidden], w["qkv"], shape.qkv_rows, w["norm1"], 1e-6, None, False, None, config=c),
                    gemv(x[q_size], w["o"], shape.hidden, None, 1e-6, None, False, x[shape.hidden], config=c),
                    gemv(x[shape.hidden], w["gate_up"], 2 * shape.inner, w["norm1"], 1e-6, None, True, None, config=c),
                )
                for rw in shapes
            ]
        )
        best = measure()
        emit(work="tune", model=shape.name, what="start", step_ms=round(best, 4))
        for site, key in sites.items():
            log: list[tuple[float, tuple[int, int, int, int]]] = []
            for config in [(*rw, per_sm, mib) for rw in shapes for per_sm in (1, 2, 4, 999) for mib in (0, 16)]:
                before, chosen[key] = chosen[key], config
                log.append((round(ms := measure(), 4), config))
                best, chosen[key] = (ms, config) if ms < best else (best, before)
            for mib in (4, 8, 32):
                before, chosen[key] = chosen[key], (*chosen[key][:3], mib)
                log.append((round(ms := measure(), 4), chosen[key]))
                best, chosen[key] = (ms, chosen[key]) if ms < best else (best, before)
            emit(work="tune", model=shape.name, what=site, step_ms=round(best, 4), chosen=chosen[key], top=sorted(log)[:5], worst=max(log))
        decode_log: list[tuple[float, tuple[int, int, int, int, int]]] = []
        for decode_config in DECODE_CONFIGS:
            kept, decode[0] = decode[0], decode_config
            decode_log.append((round(ms := measure(), 4), decode_config))
            best, decode[0] = (ms, decode_config) if ms < best else (best, kept)
        emit(work="tune", model=shape.name, what="decode", step_ms=round(best, 4), chosen=decode[0], top=sorted(decode_log))
    finally:
        triton_linear.gemv_config, triton_decode.decode_config = saved


def section_chunks(shape: Shape, sweep: bool) -> None:
    """A prompt's linears whole and in chunks of tokens, the residual and SiLU-mul included, and both linears of the MLP chunk by chunk."""
    silu_mul_library().build()
    library = load_silu_mul_gemms(torch.device("cuda", torch.cuda.current_device()))
    weights = shape.weights[:4]

    def activate(x: torch.Tensor, weight: torch.Tensor, kernel: str | None) -> torch.Tensor:
        if library is None or kernel is None:
            return silu_mul_rows(F.linear(x, weight))
        return run_silu_mul_gemm(library, kernel, x, weight)

    def over_layers(run: Callable[[dict[str, Any], slice], object], chunks: list[slice]) -> None:
        for w in weights:
            for at in chunks:
                run(w, at)

    for num_tokens in (16384, 8192, 4096, 2816):
        x = torch.randn(num_tokens, shape.hidden, device="cuda").to(DTYPE)
        inner, attended, residual = (
            torch.randn(num_tokens, size, device="cuda").to(DTYPE) for size in (shape.inner, shape.heads * shape.head_dim, shape.hidden)
        )
        of_layer: dict[str, Callable[[dict[str, Any], slice], object]] = {
            "qkv": lambda w, at, x=x: F.linear(x[at], w["qkv"]),  # type: ignore[misc]
            "o": lambda w, at, x=attended, r=residual: torch.addmm(r[at], x[at], w["o"].t()),  # type: ignore[misc]
            "down": lambda w, at, x=inner, r=residual: torch.addmm(r[at], x[at], w["down"].t()),  # type: ignore[misc]
        }
        for kernel in (None, *(KERNELS if library is not None else ())):

            def gate_up(w: dict[str, Any], at: slice, x: Any = x, kernel: str | None = kernel) -> torch.Tensor:
                return activate(x[at], w["gate_up"], kernel)

            def mlp(w: dict[str, Any], at: slice, gate_up: Any = gate_up, r: Any = residual) -> torch.Tensor:
                return torch.addmm(r[at], gate_up(w, at), w["down"].t())

            of_layer |= {f"gate_up {kernel or 'cuBLAS'}": gate_up, f"mlp {kernel or 'cuBLAS'}": mlp}
        graphs = {}
        for what, run in of_layer.items():
            for chunk in (num_tokens, *(size for size in (8192, 4096, 2048, 1024, 512) if size < num_tokens)):
                at = [slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk)]
                graphs[f"{what} {chunk}"] = capture(functools.partial(over_layers, run, at), warm_up=2)
        microseconds = {name: round(ms * 1e3 / len(weights), 1) for name, ms in in_turns_ms(graphs).items()}
        for what in of_layer:
            emit(
                work="chunks",
                model=shape.name,
                what=what,
                tokens=num_tokens,
                us={name.removeprefix(f"{what} "): us for name, us in microseconds.items() if name.startswith(f"{what} ")},
            )


def section_lengths(shape: Shape, sweep: bool) -> None:
    """Decode attention over sequences whose lengths differ, in any order and the longest first, and over equal ones."""
    rng = random.Random(0)
    served = [rng.randint(64, 1024) + rng.randint(0, 250) for _ in range(256)]  # as under the mixed load of `benchmarks.gpu`
    cases = {
        f"{batch} {what}": lengths
        for batch in (256, 128, 64)
        for what, lengths in (
            ("served", served[:batch]),
            ("served, longest first", sorted(served[:batch], reverse=True)),
            ("served and 4 of 8000, longest first", sorted([*served[: batch - 4], *[8000] * 4], reverse=True)),
            ("x 192", [192] * batch),
            ("x 640", [640] * batch),
        )
    }
    configs = [
        (block, splits, stages, warps, least)
        for block, warps in ((32, 1), (64, 2), (64, 4))
        for splits in (1, 2, 4)
        for stages in (2, 3)
        for least in ((512, 2048) if splits > 1 else (512,))
    ]
    for name, lengths in cases.items():
        sweep_decode(shape, name, lengths, configs)


def section_long(shape: Shape, sweep: bool) -> None:
    """Decode attention over long contexts, and over short ones of the same batch, which must not pay for it; in bfloat16 and float8."""
    configs = [
        (block, splits, stages, warps, least)
        for block, warps in ((64, 1), (64, 2), (128, 4), (256, 4))
        for splits in (4, 8, 16)
        for stages in (2, 3)
        for least in (512, 2048)
    ]
    kept = ARGS.kv_cache_dtype
    for ARGS.kv_cache_dtype in ("fp8", "auto"):
        for batch, length in ((1, 4096), (1, 32000), (8, 16000), (16, 640), (16, 24000), (32, 16000)):
            sweep_decode(shape, f"{batch} x {length}", [length] * batch, configs)
    ARGS.kv_cache_dtype = kept


def sweep_decode(shape: Shape, name: str, lengths: list[int], configs: list[tuple[int, int, int, int, int]]) -> None:
    """Time decode attention of sequences of these lengths with each config beside `decode_config`'s."""
    batch = len(lengths)
    layers = max(1, min(4, (1 << 30) // (sum(lengths) * 4 * shape.kv_heads * shape.head_dim) + 1))  # more than L2 holds
    metadata, caches = make_batch(shape, [1] * batch, lengths, None, layers=layers)
    qkv = torch.randn(batch, shape.qkv_rows, device="cuda").to(DTYPE)
    q, k, v = split_qkv(qkv, shape.heads, shape.kv_heads)
    cos, sin = rope_tables(batch, shape.head_dim)
    out = torch.empty(batch, shape.heads, shape.head_dim, dtype=DTYPE, device="cuda")

    def attend(config: tuple[int, int, int, int, int]) -> None:
        for cache in caches:
            triton_decode.decode_attention(
                q, k, v, cos, sin, cache, shape.head_dim**-0.5, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
                metadata.slot_mapping, out, batch, config=config,
            )  # fmt: skip

    used = triton_decode.decode_config(batch, shape.kv_heads, num_sms(q.device), caches[0].itemsize, shape.head_dim)
    compile_in_parallel([lambda c=c: attend(c) for c in configs])  # type: ignore[misc]
    times = {
        config: round(time_ms(lambda config=config: attend(config), 6.0) * 1e3 / len(caches), 1)  # type: ignore[misc]
        for config in dict.fromkeys([used, *configs])
    }
    size = sum(lengths) * 2 * shape.kv_heads * shape.head_dim * caches[0].itemsize
    emit(
        work="decode_lengths",
        model=shape.name,
        batch=name,
        kv=str(caches[0].dtype),
        config=used,
        us=times[used],
        tb_s=round(size / times[used] / 1e6, 2),
        best=sorted((us, config) for config, us in times.items())[:5],
    )


SECTIONS = {
    "sweep": sweep_linear,
    "medium": section_medium,
    "tune": section_tune,
    "chunks": section_chunks,
    "lengths": section_lengths,
    "long": section_long,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default="qwen3-0.6b,llama-8b")
    args = parser.parse_args()
    ARGS.sweep = True
    run_sections(SECTIONS, args.sections.split(","), args.models.split(","))


if __name__ == "__main__":
    main()

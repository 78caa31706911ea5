"""Checks and times every CUDA kernel of `custom_ops` on its own. Prints JSON lines.

usage: python -m benchmarks.ops_gpu [--sections linear,decode,...] [--models llama-8b,qwen3-0.6b] [--sweep] [--flashinfer]
           [--kv-cache-dtype fp8]
Each check draws fresh random inputs and compares with torch in float32; each time is the replay of a CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import emit, event_ms, relative_error, time_ms
from compile_and_serve.custom_ops.attention.flashinfer_backend import FlashInferAttention
from compile_and_serve.custom_ops.attention.flashinfer_prefill import AttentionShape
from compile_and_serve.custom_ops.attention.rope_attention import norm_rope_reference
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.attention.triton_decode import decode_attention
from compile_and_serve.custom_ops.attention.triton_prefill import prefill_attention
from compile_and_serve.custom_ops.attention.triton_rope import rope_kv_write, split_qkv
from compile_and_serve.custom_ops.linear.triton_linear import fused_linear
from compile_and_serve.custom_ops.sampling.triton_sampling import greedy_tokens, sample_tokens
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.runtime.runner.device import resolve_kv_cache_dtype

CONFIGS = Path(__file__).resolve().parent / "configs"
BLOCK_SIZE = 16
DTYPE = torch.bfloat16


class Shape:
    """Sizes of a model, and random weights for it: the layers' four linears and two norms."""

    def __init__(self, name: str) -> None:
        config = json.loads((CONFIGS / name / "config.json").read_text())
        self.name = name
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads, self.head_dim = (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
        self.layers, self.vocab, self.eps = config["num_hidden_layers"], config["vocab_size"], config["rms_norm_eps"]
        self.qk_norm = config["model_type"] == "qwen3"
        self.qkv_rows = (self.heads + 2 * self.kv_heads) * self.head_dim

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Linear name → outputs, inputs."""
        q_size = self.heads * self.head_dim
        return {
            "qkv": (self.qkv_rows, self.hidden),
            "o": (self.hidden, q_size),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    def make_weights(self) -> None:
        """Allocate every layer's weights, so that a pass over the layers reads each byte from memory."""

        def linear(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=DTYPE, device="cuda").normal_(std=columns**-0.5)

        def norm(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=DTYPE, device="cuda").uniform_(0.5, 1.5)

        self.weights: list[dict[str, Any]] = [
            {
                **{site: linear(*size) for site, size in self.sizes().items()},
                "norm1": norm(self.hidden),
                "norm2": norm(self.hidden),
                "q_norm": norm(self.head_dim) if self.qk_norm else None,
                "k_norm": norm(self.head_dim) if self.qk_norm else None,
            }
            for _ in range(self.layers)
        ]
        self.embedding = linear(self.vocab, self.hidden)
        self.lm_head = linear(self.vocab, self.hidden)
        self.final_norm = norm(self.hidden)

    def sites(self) -> dict[str, dict[str, Any]]:
        """Linear name → how it is called in a layer."""
        return {"qkv": {"norm": True}, "o": {"residual": True}, "gate_up": {"norm": True, "silu_mul": True}, "down": {"residual": True}}


def make_batch(
    shape: Shape, query_lens: list[int], seq_lens: list[int], backend: Any, layers: int = 1
) -> tuple[AttentionMetadata, list[torch.Tensor]]:
    """Metadata of a batch with scattered blocks, and `layers` caches with random contents."""
    columns = max(-(-n // BLOCK_SIZE) for n in seq_lens) + 2
    num_blocks = len(seq_lens) * columns + 1
    table = (torch.randperm(num_blocks - 1)[: len(seq_lens) * columns] + 1).reshape(len(seq_lens), columns).to(torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    slots = []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(table[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
    metadata = AttentionMetadata(
        backend=backend, query_start_loc=starts.cuda(), seq_lens=torch.tensor(seq_lens, dtype=torch.int32).cuda(), block_table=table.cuda(),
        slot_mapping=torch.cat(slots).cuda(), num_seqs=len(seq_lens), num_tokens=sum(query_lens), max_query_len=max(query_lens),
        max_seq_len=max(seq_lens), query_start_loc_cpu=starts.numpy(), seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int32).numpy(),
    )  # fmt: skip
    size = (num_blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    cache_dtype = resolve_kv_cache_dtype(ARGS.kv_cache_dtype, DTYPE)
    return metadata, [torch.randn(size, dtype=DTYPE, device="cuda").to(cache_dtype) for _ in range(layers)]


def rope_tables(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(num_tokens, head_dim // 2, device="cuda") * 6.28
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def compile_in_parallel(calls: list[Callable[[], Any]]) -> float:
    """Run every call once in threads, so that Triton compiles them side by side; → seconds."""
    started = time.perf_counter()
    calls[0]()
    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(call) for call in calls[1:]]:
            try:
                future.result()
            except Exception as error:
                emit(work="compile", failed=repr(error)[:300])
    torch.cuda.synchronize()
    return time.perf_counter() - started


def linear_arguments(shape: Shape, site: str, num_tokens: int) -> dict[str, Any]:
    """Inputs of one linear with its prologue and epilogue."""
    how, weight = shape.sites()[site], shape.weights[0][site]
    rows = weight.shape[0] // 2 if how.get("silu_mul") else weight.shape[0]
    return {
        "x": torch.randn(num_tokens, weight.shape[1], device="cuda").to(DTYPE),
        "residual": torch.randn(num_tokens, rows, device="cuda").to(DTYPE) if how.get("residual") else None,
        "silu_mul": how.get("silu_mul", False),
        "norm": how.get("norm", False),
        "norm_name": "norm1" if site == "qkv" else "norm2",
    }


def call_linear(kernel: Callable[..., torch.Tensor], shape: Shape, layer: int, site: str, a: dict[str, Any], **extra: Any) -> torch.Tensor:
    weights = shape.weights[layer]
    return kernel(
        a["x"],
        weights[site],
        weights[site].shape[0],
        weights[a["norm_name"]] if a["norm"] else None,
        shape.eps,
        None,
        a["silu_mul"],
        a["residual"],
        **extra,
    )


def reference_linear(shape: Shape, site: str, a: dict[str, Any]) -> torch.Tensor:
    x = a["x"].float()
    if a["norm"]:
        x = F.rms_norm(x, (x.shape[1],), shape.weights[0][a["norm_name"]].float(), shape.eps)
    y = F.linear(x, shape.weights[0][site].float())
    if a["silu_mul"]:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y + a["residual"].float() if a["residual"] is not None else y


def section_linear(shape: Shape, sweep: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    sites = list(shape.sites())
    counts = (1, 2, 8, 16, 17, 64)
    arguments = {(site, m): linear_arguments(shape, site, m) for site in sites for m in counts}
    seconds = compile_in_parallel(
        [lambda k=key: call_linear(fused_linear, shape, 0, k[0], arguments[k]) for key in arguments]  # type: ignore[misc]
    )
    emit(work="compile", section="linear", model=shape.name, seconds=round(seconds, 1))
    for (site, m), a in arguments.items():
        error = relative_error(call_linear(fused_linear, shape, 0, site, a), reference_linear(shape, site, a))
        emit(work="check_linear", model=shape.name, site=site, tokens=m, error=float(f"{error:.2e}"), ok=error < 1e-2)

    total_bytes = sum(w.numel() * 2 for w in (*[shape.weights[0][s] for s in sites] * shape.layers, shape.lm_head))
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        x = {site: linear_arguments(shape, site, m) for site in sites}
        last = torch.randn(m, shape.hidden, device="cuda").to(DTYPE)

        def ours(x: dict[str, Any] = x, last: torch.Tensor = last) -> None:
            for layer in range(shape.layers):
                for site in sites:
                    call_linear(fused_linear, shape, layer, site, x[site])
            fused_linear(last, shape.lm_head, shape.vocab, shape.final_norm, shape.eps)

        def cublas(x: dict[str, Any] = x, last: torch.Tensor = last) -> None:
            for layer in range(shape.layers):
                for site in sites:
                    F.linear(x[site]["x"], shape.weights[layer][site])
            F.linear(last, shape.lm_head)

        mine, theirs = time_ms(ours), time_ms(cublas)
        emit(
            work="all_linears",
            model=shape.name,
            tokens=m,
            ms=round(mine, 4),
            tb_s=round(total_bytes / mine / 1e9, 3),
            cublas_without_norms_ms=round(theirs, 4),
        )


def section_decode(shape: Shape, sweep: bool) -> None:
    tokens = shape.qkv_rows
    norms = (shape.weights[0]["q_norm"], shape.weights[0]["k_norm"])
    scale = shape.head_dim**-0.5
    for seq_lens in ([1], [700], [5, 17, 192, 1000, 33, 64, 65, 2047], [4000] + [3] * 70):
        backend = TritonAttention()
        metadata, (cache,) = make_batch(shape, [1] * len(seq_lens), seq_lens, backend)
        qkv = torch.randn(len(seq_lens), tokens, device="cuda").to(DTYPE)
        cos, sin = rope_tables(len(seq_lens), shape.head_dim)
        expected_cache = cache.float() if cache.dtype == DTYPE else cache.clone()
        q, k, v = split_qkv(qkv.float(), shape.heads, shape.kv_heads)
        q = norm_rope_reference(q, cos, sin, norms[0], shape.eps)
        k = norm_rope_reference(k, cos, sin, norms[1], shape.eps)
        expected = TorchAttention().forward(q, k.to(DTYPE).float(), v, expected_cache, scale, metadata)
        out = backend.rope_forward(qkv, cos, sin, cache, shape.heads, shape.kv_heads, scale, *norms, shape.eps, metadata)
        error = relative_error(out, expected.flatten(1))
        cache_error = relative_error(cache.float(), expected_cache.float())
        emit(
            work="check_decode",
            model=shape.name,
            seqs=len(seq_lens),
            error=float(f"{error:.2e}"),
            cache_error=float(f"{cache_error:.2e}"),
            ok=error < 1e-2 and cache_error < 1e-3,
        )
    configs: list[tuple[int, int, int, int, int] | None] = [None]
    if sweep:
        configs += [
            (16, 1, 4, 1, 16),
            (16, 1, 6, 1, 16),
            (32, 1, 4, 1, 32),
            (32, 1, 3, 2, 32),
            (64, 1, 3, 4, 64),
            (64, 1, 3, 2, 64),
            (64, 2, 3, 4, 64),
            (128, 1, 2, 4, 128),
            (128, 1, 3, 4, 128),
        ]
    for batch, length in ((1, 192), (1, 4096), (8, 192), (32, 192), (64, 192), (64, 1024), (256, 192), (256, 700)):
        layers = 4 if batch * length >= 1 << 17 else 8
        metadata, caches = make_batch(shape, [1] * batch, [length] * batch, None, layers)
        qkv = torch.randn(batch, tokens, device="cuda").to(DTYPE)
        q, k, v = split_qkv(qkv, shape.heads, shape.kv_heads)
        cos, sin = rope_tables(batch, shape.head_dim)
        out = torch.empty(batch, shape.heads, shape.head_dim, dtype=DTYPE, device="cuda")
        results = []
        for config in configs:

            def run(config: tuple[int, int, int, int, int] | None = config) -> None:
                for cache in caches:
                    decode_attention(
                        q, k, v, cos, sin, cache, scale, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
                        metadata.slot_mapping, out, batch, *norms, shape.eps, config=config,
                    )  # fmt: skip

            try:
                results.append((round(time_ms(run, 15.0) * 1e3 / layers, 2), config))
            except Exception as error:
                emit(work="sweep_failed", config=config, error=repr(error)[:200])
        size = batch * length * shape.kv_heads * shape.head_dim * 2 * caches[0].itemsize
        emit(work="decode_attention", model=shape.name, kv_cache_dtype=ARGS.kv_cache_dtype, batch=batch, length=length, us=results[0][0],
             tb_s=round(size / results[0][0] / 1e6, 2), best=sorted(results, key=lambda r: r[0])[:4])  # fmt: skip


def section_prefill(shape: Shape, sweep: bool) -> None:
    scale = shape.head_dim**-0.5
    norms = (shape.weights[0]["q_norm"], shape.weights[0]["k_norm"])
    backends: list[tuple[str, Any]] = [("triton", TritonAttention())]
    if ARGS.flashinfer:
        backends.append(("flashinfer", FlashInferAttention(build=False)))
    for name, backend in backends:
        for query_lens, seq_lens in (([5, 130, 64], [5, 300, 64]), ([1, 1, 257, 33], [700, 3, 257, 1000]), ([300], [1300])):
            metadata, (cache,) = make_batch(shape, query_lens, seq_lens, backend)
            metadata.num_tokens, total = sum(query_lens), sum(query_lens) + 3
            metadata.slot_mapping = F.pad(metadata.slot_mapping, (0, 3), value=-1)
            qkv = torch.randn(total, shape.qkv_rows, device="cuda").to(DTYPE)
            cos, sin = rope_tables(total, shape.head_dim)
            expected_cache = cache.float() if cache.dtype == DTYPE else cache.clone()
            q, k, v = split_qkv(qkv.float(), shape.heads, shape.kv_heads)
            q = norm_rope_reference(q, cos, sin, norms[0], shape.eps)
            k = norm_rope_reference(k, cos, sin, norms[1], shape.eps)
            expected = TorchAttention().forward(q, k.to(DTYPE).float(), v, expected_cache, scale, metadata)
            backend.plan(metadata)
            out = backend.rope_forward(qkv, cos, sin, cache, shape.heads, shape.kv_heads, scale, *norms, shape.eps, metadata)
            used = backend.module_status() if isinstance(backend, FlashInferAttention) else {}
            error = relative_error(out[:-3], expected.flatten(1)[:-3])
            cache_error = relative_error(cache.float(), expected_cache.float())
            emit(
                work="check_prefill",
                backend=name,
                model=shape.name,
                queries=query_lens,
                error=float(f"{error:.2e}"),
                cache_error=float(f"{cache_error:.2e}"),
                ok=error < 1e-2 and cache_error < 1e-3 and bool(out.isfinite().all()),
                modules=used,
            )
    for query_lens in ([1024], [4096], [4096, 4096], [512] * 4, [8192]):
        total = sum(query_lens)
        metadata, (cache,) = make_batch(shape, query_lens, query_lens, None)
        qkv = torch.randn(total, shape.qkv_rows, device="cuda").to(DTYPE)
        q, k, v = split_qkv(qkv, shape.heads, shape.kv_heads)
        cos, sin = rope_tables(total, shape.head_dim)
        out = torch.empty(total, shape.heads, shape.head_dim, dtype=DTYPE, device="cuda")
        flops = sum(2 * n * n for n in query_lens) * shape.heads * shape.head_dim
        rope_us = time_ms(lambda: rope_kv_write(q, k, v, cos, sin, cache, metadata.slot_mapping, *norms, shape.eps)) * 1e3
        rotated = rope_kv_write(q, k, v, cos, sin, cache, metadata.slot_mapping, *norms, shape.eps)
        configs: list[tuple[int, int, int, int] | None] = [None]
        if sweep:
            configs += [(128, 64, 2, 8), (128, 128, 2, 8), (64, 64, 3, 4), (128, 64, 4, 8), (128, 32, 4, 8), (64, 128, 2, 4)]
        results = []
        for config in configs:
            try:
                ms = time_ms(
                    lambda config=config: prefill_attention(  # type: ignore[misc]
                        rotated,
                        cache,
                        scale,
                        metadata.query_start_loc,
                        metadata.seq_lens,
                        metadata.block_table,
                        out,
                        len(query_lens),
                        config=config,
                    ),
                    30.0,
                )
                results.append((round(ms * 1e3, 1), config))
            except Exception as error:
                emit(work="sweep_failed", config=config, error=repr(error)[:200])
        best = min(results, key=lambda r: r[0])
        row = {
            "triton_us": results[0][0],
            "triton_tflops": round(flops / results[0][0] / 1e6, 1),
            "best": sorted(results, key=lambda r: r[0])[:3],
        }
        row["best_tflops"] = round(flops / best[0] / 1e6, 1)
        if ARGS.flashinfer and cache.dtype == DTYPE:
            row |= flashinfer_times(shape, metadata, rotated, cache, scale, flops)
        emit(
            work="prefill_attention",
            model=shape.name,
            kv_cache_dtype=ARGS.kv_cache_dtype,
            queries=query_lens,
            rope_us=round(rope_us, 1),
            **row,
        )


def flashinfer_times(
    shape: Shape, metadata: AttentionMetadata, q: torch.Tensor, cache: torch.Tensor, scale: float, flops: int
) -> dict[str, float | str]:
    """Microseconds and TFLOP/s of FlashInfer's paged prefill, FA2 and FA3, where the modules are built."""
    row: dict[str, float | str] = {}
    for variant in ("fa2", "fa3"):
        backend = FlashInferAttention(build=False)
        modules = backend.modules(DTYPE, shape.head_dim, q.device)
        modules.variants = (variant,)
        if modules.load(variant) is None:
            row[variant] = modules.status()[variant]
            continue
        backend._choose = lambda *_, variant=variant: variant  # type: ignore[method-assign]
        backend.plan(metadata)
        assert backend.planned_step is not None
        backend.planned_step.is_fresh = False  # or FA3 would read the step's keys, not the pages
        started = time.perf_counter()
        prefill = backend.planned_prefill(
            AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, BLOCK_SIZE, DTYPE, DTYPE, scale), q.device, metadata
        )
        row[f"{variant}_first_plan_ms"] = round((time.perf_counter() - started) * 1e3, 2)
        assert prefill is not None
        out = torch.empty_like(q)
        us = event_ms(lambda: prefill.run(q, cache[:, 0], cache[:, 1], out)) * 1e3
        row |= {f"{variant}_us": round(us, 1), f"{variant}_tflops": round(flops / us / 1e6, 1)}
    return row


def section_sampling(shape: Shape, sweep: bool) -> None:
    """The kernels that end a decode step, over the model's vocabulary and SmolLM2's: greedy alone, and what a step of any requests runs."""
    kinds = {  # temperature, top-k, top-p
        "step_greedy": (0.0, 0, 1.0),
        "top_k_top_p": (0.8, 40, 0.9),
        "top_p": (0.8, 0, 0.9),
        "large_top_k": (0.8, 1000, 1.0),  # checked, not gathered
        "large_top_k_float32": (0.8, 1000, 1.0),
        "temperature": (0.8, 0, 1.0),
    }
    for vocab, batch in itertools.product(sorted({49152, shape.vocab}), (1, 64, 256)):
        logits = torch.randn(batch, vocab, device="cuda").to(DTYPE)
        first = (logits == logits.max(1, keepdim=True).values).int().argmax(1)
        row = {"greedy_us": time_ms(lambda: greedy_tokens(logits)), "torch_argmax_us": time_ms(lambda: logits.argmax(-1))}
        right = torch.equal(greedy_tokens(logits)[0], first)
        for name, (temperature, top_k, top_p) in kinds.items():
            arguments = [
                torch.full((batch,), value, device="cuda", dtype=dtype)
                for value, dtype in (
                    (temperature, torch.float32),
                    (top_k, torch.int32),
                    (top_p, torch.float32),
                    (0.0, torch.float32),
                    (7, torch.int64),
                    (3, torch.int64),
                )
            ]
            given = logits.float() if name.endswith("float32") else logits
            row[f"{name}_us"] = time_ms(lambda: sample_tokens(given, *arguments))
            if temperature == 0.0:
                right &= torch.equal(sample_tokens(logits, *arguments)[0], first)
        emit(work="sampling", vocab=vocab, batch=batch, ok=right, **{k: round(ms * 1e3, 1) for k, ms in row.items()})


SECTIONS = {"linear": section_linear, "decode": section_decode, "sampling": section_sampling, "prefill": section_prefill}
ARGS = argparse.Namespace(flashinfer=False, sweep=False, kv_cache_dtype="auto")


def run_sections(sections: Mapping[str, Callable[[Shape, bool], None]], names: list[str], models: list[str]) -> None:
    """Run the sections for each model; one that fails says so in a row and does not keep the others from running."""
    for name in models:
        shape = Shape(name)
        shape.make_weights()
        for section in names:
            started = time.perf_counter()
            try:
                sections[section](shape, ARGS.sweep)
            except Exception:
                emit(work="failed", section=section, model=name, error=traceback.format_exc()[-1500:])
            torch.cuda.synchronize()
            emit(work="section", section=section, model=name, seconds=round(time.perf_counter() - started, 1))
        del shape
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default="qwen3-0.6b,llama-8b")
    parser.add_argument("--sweep", action="store_true", help="also try other configurations of the attention kernels")
    parser.add_argument("--flashinfer", action="store_true", help="also check and time FlashInfer where its modules are built")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of the attention sections")
    parser.parse_args(namespace=ARGS)
    run_sections(SECTIONS, ARGS.sections.split(","), ARGS.models.split(","))


if __name__ == "__main__":
    main()

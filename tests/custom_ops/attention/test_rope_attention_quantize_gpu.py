# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""Attention whose output comes rounded, on a GPU: to the bit what rounding it afterwards gives, and a captured decode step uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("float8 needs compute capability 8.9", allow_module_level=True)

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata, attention_metadata
from compile_and_serve.custom_ops.attention.flashinfer_backend import FlashInferAttention
from compile_and_serve.custom_ops.attention.rope_attention import rope_attention
from compile_and_serve.custom_ops.attention.rope_attention_quantize import rope_attention_quantize
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.quantized import cuda_linear as quantized_linear_cuda
from compile_and_serve.custom_ops.quantized.quantization import quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.quantized_linear import quantized_linear
from compile_and_serve.custom_ops.quantized.triton_quantize import quantize_rows
from compile_and_serve.custom_ops.triton_common import split_counters
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support import attention_cases as cases
from tests.support.engines import VOCAB_SIZE, request, run_requests, tiny_config, tokens_of, write_tiny_model

CUDA = torch.device("cuda")
FP8, INT8 = torch.float8_e4m3fn, torch.int8
KINDS: dict[str, dict[str, Any]] = {
    "token": {},
    "group": {"per_group": True},
    "static": {"input_scale": torch.tensor([0.01])},
}
HEADS = [(32, 8, 128), (9, 3, 64), (6, 2, 80), (8, 4, 256)]


def options_of(kind: str) -> dict[str, Any]:
    return {key: value.to(CUDA) if isinstance(value, torch.Tensor) else value for key, value in KINDS[kind].items()}


def on_cuda(batch: cases.Batch, backend: Any) -> tuple[AttentionMetadata, int]:
    metadata, num_blocks = cases.make_metadata(batch, backend)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    return replace(metadata, **{name: getattr(metadata, name).to(CUDA) for name in names}), num_blocks


def decodes(num_seqs: int, longest: int) -> tuple[AttentionMetadata, int]:
    """A step of one token a sequence; every fifth but the first is padding of length 0."""
    lengths = torch.randint(1, longest + 1, (num_seqs,)).tolist()
    metadata, num_blocks = on_cuda(cases.Batch(query_lens=(1,) * num_seqs, seq_lens=tuple(lengths)), TritonAttention())
    padding = torch.arange(num_seqs, device=CUDA) % 5 == 4
    return replace(
        metadata, seq_lens=metadata.seq_lens.masked_fill(padding, 0), slot_mapping=metadata.slot_mapping.masked_fill(padding, -1)
    ), num_blocks  # fmt: skip


def inputs(tokens: int, num_blocks: int, heads: tuple[int, int, int], cache_dtype: torch.dtype) -> tuple[Any, ...]:
    H, K, E = heads
    qkv = torch.randn(tokens, (H + 2 * K) * E, device=CUDA).bfloat16()
    cos, sin = (torch.rand(tokens, E // 2, device=CUDA).repeat(1, 2) for _ in range(2))
    cache = torch.randn(num_blocks, 2, K, 16, E, device=CUDA).to(cache_dtype)
    return qkv, cos, sin, cache, H, K, E**-0.5


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    as_bytes = [x.contiguous().view(torch.uint8) for x in (ours, theirs)]
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*as_bytes)


def check(ours: tuple[torch.Tensor, ...], expected: torch.Tensor, dtype: torch.dtype, kind: str) -> None:
    assert cases.relative_error(ours[0], expected.double()) < 1e-3
    values, scale = quantize_rows(ours[0], dtype, **options_of(kind))
    assert same(ours[1], values)
    assert same(ours[2], scale)


@pytest.mark.parametrize(("num_seqs", "longest"), [(1, 5000), (64, 700), (130, 2500)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_decodes_round_what_they_store(cache_dtype, heads, dtype, kind, num_seqs, longest) -> None:
    metadata, num_blocks = decodes(num_seqs, longest)
    args = inputs(num_seqs, num_blocks, heads, cache_dtype)
    with attention_metadata(metadata):
        for _ in range(3):  # arrivals are counted from zero each time
            ours = rope_attention_quantize(*args, dtype=dtype, **options_of(kind))
            check(ours, rope_attention(*args), dtype, kind)
    assert not split_counters(args[0].device).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("num_seqs", [2, 64, 200])
def test_a_captured_step_serves_every_length(num_seqs, heads, kind) -> None:
    """Between replays the lengths change, also how many splits there are; kernels before and after begin early."""
    metadata, num_blocks = decodes(num_seqs, 3000)
    args = inputs(num_seqs, num_blocks, heads, torch.bfloat16)
    whole = metadata.seq_lens.clone()

    options, graph = options_of(kind), torch.cuda.CUDAGraph()

    def step() -> list[tuple[torch.Tensor, ...]]:
        return [rope_attention_quantize(*args, **options) for _ in range(4)]

    with attention_metadata(metadata):
        step()
        with torch.cuda.graph(graph):
            outs = step()
    for share in (1, 7, 50, 2):
        metadata.seq_lens.copy_(whole // share)
        graph.replay()
        with attention_metadata(metadata):
            expected = rope_attention(*args)
        for out in outs:
            check(out, expected, FP8, kind)


@pytest.mark.parametrize(
    "backend", [TritonAttention(), FlashInferAttention(build=False)], ids=lambda backend: backend.name
)
@pytest.mark.parametrize("case", [name for name, batch in cases.BATCHES.items() if batch.block_size == 16])
def test_other_steps_are_rounded_too(case: str, backend: Any) -> None:
    metadata, num_blocks = on_cuda(cases.BATCHES[case], backend)
    backend.plan(metadata)
    args = inputs(metadata.num_tokens + cases.BATCHES[case].padding, num_blocks, (8, 2, 128), torch.bfloat16)
    with attention_metadata(metadata):
        ours = rope_attention_quantize(*args)
        expected = rope_attention(*args)
    check(ours, expected, FP8, "token")


@pytest.mark.parametrize("out_features", [256, 130])
@pytest.mark.parametrize("features", [256, 36])
def test_one_token_is_rounded_by_who_reads_it(out_features: int, features: int) -> None:
    """By every way: what nobody has rounded is not read."""
    weight = torch.randn(out_features, features, device=CUDA)
    scale = row_scales(weight, FP8)
    x = torch.randn(1, features, device=CUDA).bfloat16()
    garbage = torch.full((1, features), torch.nan, device=CUDA).to(FP8), torch.full((1, 1), torch.nan, device=CUDA)
    linear = quantized_linear_cuda.QuantizedLinear(
        x_TI=x, weight_OI=quantize_weight(weight, scale, FP8), scale=scale, activations="dynamic"
    )
    for way in linear.ways():
        assert cases.relative_error(replace(linear, rounded=garbage).run(way), linear.run(way).double()) < 1e-3, way
    arguments = (x, linear.weight_OI, scale, out_features)
    result = quantized_linear(*arguments, activations="dynamic", rounded=garbage)
    assert cases.relative_error(result, quantized_linear(*arguments, activations="dynamic").double()) < 1e-3


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8-block"])
def test_a_captured_decode_step_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The same tokens as without it, where both compute products in the same way."""
    monkeypatch.setattr(quantized_linear_cuda, "fastest", lambda family, num_tokens, runs, *_, **__: next(iter(runs)))
    folder = write_tiny_model(tmp_path / "tiny")
    wide = {
        "hidden_size": 256,
        "head_dim": 64,
        "intermediate_size": 256,
        "num_key_value_heads": 4,
    }  # whole blocks of 128
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wide))
    tokens, name = [], "fuse_attention_quantize"
    for forced in ((name,), ()):
        core = EngineCore(
            tiny_config(
                folder, device="cuda", dtype="bfloat16", block_size=16, num_kv_blocks=256, attention_backend="triton",
                enforce_eager=False, async_scheduling=True, cache_dir=tmp_path / "cache", quantization=scheme, forced_passes=forced,
            )
        )  # fmt: skip
        asked = [request(f"r{i}", [(i * 37 + j * 11) % VOCAB_SIZE for j in range(1 + 7 * i)]) for i in range(6)]
        tokens.append(tokens_of(run_requests(core, asked)))
        stats = core.stats()
        assert stats.graph_replays["full"] > 0
        report = core.info.compile_report
        assert report.get(f"pass_sites.{name}.matched", 0) == (2 if forced else 0)
    assert tokens[0] == tokens[1]

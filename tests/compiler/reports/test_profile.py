"""What the measurement of pieces counts and covers; how fast anything is, is no test's business."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.reports import profile
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.serve.inspect.text import profile_tables
from tests.models.test_registry import EXPERTS
from tests.support.tiny_models import tiny_spec

CPU = torch.device("cpu")
LAYERS, HIDDEN, QKV, INTERMEDIATE, VOCAB = 3, 64, 128, 96, 320


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "CPU_STREAM_BYTES", 1 << 16)
    monkeypatch.setattr(profile, "CPU_GEMM_SIZE", 16)
    monkeypatch.setattr(profile, "RUNS", 2)


def measured(tmp_path: Path, tokens: Sequence[int], **options: Any) -> dict[str, Any]:
    config = CompileConfig(cache_dir=tmp_path, profile_tokens=tuple(tokens), **options)
    model = compile_model(
        tiny_spec(layers=LAYERS),
        config,
        device=CPU,
        dtype=torch.float32,
        kernels=frozenset({"rope_attention", "fused_linear"}),
        attention_backends={"kv_caches": TorchAttention()},
    )
    return model.report["profile"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tests to which it does not matter who compiled the pieces."""
    return tmp_path_factory.mktemp("store")


def test_each_piece_and_op_is_measured_at_each_size(store: Path) -> None:
    result = measured(store, (1, 4))
    rows = {(row["name"], row["tokens"]): row for row in result["rows"]}
    pieces = {name for name, _ in rows if name.startswith("piece ")}
    assert set(rows) == {(name, t) for name in pieces | {"rope_attention"} for t in (1, 4)}
    assert sum(rows[name, 4]["count"] for name in pieces) == LAYERS + 1
    assert rows["rope_attention", 4]["count"] == LAYERS
    assert all(row["seconds"] > 0 for row in result["rows"])
    assert [step["tokens"] for step in result["steps"]] == [1, 4]
    assert min(result["bandwidth"], result["gemm_rate"]) > 0


def test_work_is_counted_from_the_graph(store: Path) -> None:
    tokens = 4
    rows = {row["name"]: row for row in measured(store, (tokens,))["rows"]}
    # o_proj, gate and up, down, and the next layer's qkv; each product is 2·T·I·O
    macs = HIDDEN * HIDDEN + HIDDEN * 2 * INTERMEDIATE + INTERMEDIATE * HIDDEN + HIDDEN * QKV
    assert rows["piece 1"]["flops"] == 2 * tokens * macs
    # two norms' weights; in: attention's result and the residual; out: the residual and qkv
    values = macs + 2 * HIDDEN + tokens * (2 * HIDDEN + HIDDEN + QKV)
    assert rows["piece 1"]["bytes"] == 4 * values
    # the last piece ends with the final norm and the vocabulary
    last = max(name for name in rows if name.startswith("piece "))
    assert rows[last]["flops"] >= 2 * tokens * HIDDEN * VOCAB
    # an embedding is read by rows: less than the table
    assert rows["piece 0"]["bytes"] < 4 * (VOCAB * HIDDEN + HIDDEN * QKV)
    heads, kv_heads, size = 4, 2, 16
    assert rows["rope_attention"]["flops"] == 4 * profile.CONTEXT * tokens * heads * size
    cached = tokens * profile.CONTEXT * 2 * kv_heads * size
    assert rows["rope_attention"]["bytes"] == 4 * (cached + tokens * (QKV + 2 * size + heads * size))


@pytest.mark.slow
def test_load_of_experts(tmp_path: Path) -> None:
    tokens = 32
    spec = tiny_spec("Qwen3MoeForCausalLM", LAYERS, torch.float32, **EXPERTS["Qwen3MoeForCausalLM"])
    model = compile_model(
        spec,
        CompileConfig(cache_dir=tmp_path, profile_tokens=(1, tokens)),
        device=CPU,
        dtype=torch.float32,
        kernels=frozenset({"rope_attention", "fused_linear"}),
        attention_backends={"kv_caches": TorchAttention()},
    )
    result = model.report["profile"]
    alone, many = result["experts"]
    assert alone == {"tokens": 1, "layers": LAYERS, "experts": 4, "distinct": 2.0, "largest": 2.0}  # two experts of a token
    assert (many["tokens"], many["layers"]) == (tokens, LAYERS)
    assert 2 < many["distinct"] <= 4
    assert 1 <= many["largest"] < 2
    rows = {(row["name"], row["tokens"]): row for row in result["rows"]}
    # per expert gate, up and down of 24 features; o_proj, the router and the next layer's qkv
    macs = 2 * 3 * 24 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * 4 + HIDDEN * QKV
    assert 2 * tokens * macs <= rows["piece 1", tokens]["flops"] < 2.2 * tokens * macs
    assert rows["piece 1", 1]["bytes"] < rows["piece 1", tokens]["bytes"]
    (table,) = [one for one in profile_tables(result) if "Experts" in str(one.title)]
    assert table.row_count == 2


def test_experts_read_the_adapters_of_the_experts_that_tokens_go_to() -> None:
    tokens, experts, slots, top_k = 2, 8, 3, 4
    shapes = {
        "x": (tokens, 16),
        "ids": (tokens, top_k),
        "weights": (tokens, top_k),
        "gate_up": (experts, 32, 16),
        "down": (experts, 16, 16),
        "a": (slots, experts, 4, 16),
        "b": (slots, experts, 1, 4, 16),
    }
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in shapes}
    for name, shape in shapes.items():
        nodes[name].meta["example_value"] = torch.empty(shape, device="meta")
    *operands, a, b = nodes.values()
    adapters = {"gate_up_a": a, "gate_up_b": b, "down_a": a, "down_b": b, "adapter_index": nodes["ids"]}
    graph.call_function(torch.ops.cas.experts.default, tuple(operands), adapters)
    for node in (nodes["gate_up"], a, b):  # half of the experts have no token of the first, a quarter none of both
        assert profile._input_bytes(node, tokens) == node.meta["example_value"].numel() * 4 * 3 // 4


def test_an_artifact_does_not_stand_in_for_a_measurement(store: Path) -> None:
    measured(store, (1,))
    assert measured(store, (1,))["rows"]


@pytest.mark.exhaustive
def test_without_a_backend_it_is_a_sentence(tmp_path: Path) -> None:
    config = CompileConfig(cache_dir=tmp_path, profile_tokens=(1,))
    with pytest.raises(ValueError, match="needs attention backends"):
        compile_model(tiny_spec(), config, device=CPU, dtype=torch.float32)

"""Sharded models on ranks that are processes: the same tokens as one rank, the same bits on every rank, one compilation for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.collectives.allreduce_norm import allreduce_add_rms_norm
from compile_and_serve.custom_ops.collectives.collectives import all_gather, all_reduce, rank_group
from compile_and_serve.custom_ops.mesh import Axis, Mesh
from tests.models.test_registry import EXPERTS
from tests.support.ranks import run_ranks
from tests.support.tiny_models import caches, fill, step, tiny_spec

CPU = torch.device("cpu")
PROMPT = [3, 141, 59, 26, 5, 35, 8]
NEW_TOKENS = 6
FUSED = frozenset({"rope_attention", "fused_linear"})


@dataclass(frozen=True, slots=True)
class Case:
    """A tiny float32 model and how it is compiled."""

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    quantization: Any = None
    kernels: frozenset[str] = FUSED


CASES = {
    "biases on 2": (2, Case("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})),
    "experts on 2": (
        2,
        Case(
            "Qwen2MoeForCausalLM",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
        ),
    ),
    "latent attention on 2": (2, Case("DeepseekV3ForCausalLM", EXPERTS["DeepseekV3ForCausalLM"])),
    "int8 on 2": (2, Case("LlamaForCausalLM", quantization="int8-weight-only")),
    # 2 key/value heads on 4 ranks; the norms are the all-reduces', not the linears'
    "key/value heads shared by 4": (
        4,
        Case("Qwen3ForCausalLM", {"attention_bias": True, "vocab_size": 321}, kernels=FUSED | {"allreduce_add_rms_norm"}),
    ),
}


def run_case(case: Case, size: int, rank: int, cache_dir: str | None) -> tuple[torch.Tensor, list[int], dict[str, Any]]:
    """Logits of the prompt and of each greedy token, the tokens, and what the compiler reports."""
    spec = tiny_spec(case.architecture, 2, torch.float32, **case.changes)
    config = CompileConfig(
        mode="compile" if cache_dir else "eager",
        cache_dir=None if cache_dir is None else Path(cache_dir),
        tensor_parallel_size=size,
        quantization=case.quantization,
    )
    model = compile_model(spec, config, device=CPU, dtype=torch.float32, kernels=case.kernels)
    fill(model, rank=rank)
    kv_caches = caches(spec, torch.float32, tensor_parallel_size=size)
    logits = step(model, PROMPT, 0, kv_caches, TorchAttention())
    rows, tokens = [logits], []
    for start in range(len(PROMPT), len(PROMPT) + NEW_TOKENS):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(step(model, tokens[-1:], start, kv_caches, TorchAttention()))
    kept = ("artifact", "artifact_key", "distinct_pieces")
    return torch.cat(rows), tokens, {name: model.report[name] for name in kept if name in model.report}


def run_rank(rank: int, name: str, cache_dir: str) -> tuple[torch.Tensor, list[int], dict[str, Any]]:
    size, case = CASES[name]
    return run_case(case, size, rank, cache_dir)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["biases"])
@pytest.mark.parametrize("name", CASES)
def test_sharded_models_say_the_same(name: str, tmp_path: Path) -> None:
    size, case = CASES[name]
    results = run_ranks(size, run_rank, name, str(tmp_path / "artifacts"), folder=tmp_path)
    logits, tokens, _ = run_case(case, 1, 0, str(tmp_path / "artifacts") if case.quantization else None)
    for sharded, sharded_tokens, _ in results:
        torch.testing.assert_close(sharded, logits, rtol=1e-4, atol=1e-4)
        assert sharded_tokens == tokens
        assert torch.equal(sharded, results[0][0]), "ranks differ in their last bits, and would sample differently"
    reports = [report for _, _, report in results]
    assert sorted(report["artifact"] for report in reports) == ["hit"] * (size - 1) + ["made"]
    assert len({report["artifact_key"] for report in reports}) == 1
    assert reports[0]["distinct_pieces"] == 3


MESH = Mesh(data=2, tensor=2, expert_parallel=True)
GROUPS: dict[Axis, list[list[int]]] = {"tensor": [[0, 1], [2, 3]], "data": [[0, 2], [1, 3]], "expert": [[0, 1, 2, 3]]}
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def random_part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 14, generator=torch.Generator().manual_seed(rank)).to(dtype)[:, ::2]  # strided


def collectives_of_groups(rank: int) -> dict[tuple[str, torch.dtype], tuple[torch.Tensor, ...]]:
    results = {}
    for name, partition in GROUPS.items():
        size = len(partition[0])
        for dtype in DTYPES:
            x = random_part(rank, dtype)
            total, _ = allreduce_add_rms_norm(x, torch.ones_like(x), torch.ones(7, dtype=dtype), 1e-6, name)
            index = torch.tensor(rank_group(name).rank)
            results[name, dtype] = (all_reduce(x, name), all_gather(x, size, 7 * size - 2, name), total, index)
    assert torch.equal(all_reduce(random_part(rank, torch.float32)), results["tensor", torch.float32][0])  # the default
    return results


@pytest.mark.slow
def test_collectives_equal_their_definition_in_every_group(tmp_path: Path) -> None:
    by_rank = run_ranks(4, collectives_of_groups, folder=tmp_path, mesh=MESH)
    for name, dtype in by_rank[0]:
        for members in GROUPS[name]:
            parts = [random_part(member, dtype) for member in members]
            expected = torch.stack([part.double() for part in parts]).sum(0)
            for index, member in enumerate(members):
                total, gathered, with_residual, rank = by_rank[member][name, dtype]
                assert total.dtype == with_residual.dtype == dtype
                torch.testing.assert_close(total.double(), expected, rtol=DTYPES[dtype], atol=1e-6)
                torch.testing.assert_close(with_residual.double(), 1 + expected, rtol=2 * DTYPES[dtype], atol=2 * DTYPES[dtype])
                assert torch.equal(total, by_rank[members[0]][name, dtype][0])
                assert torch.equal(gathered, torch.cat(parts, dim=1)[:, : 7 * len(members) - 2])
                assert gathered.is_contiguous()
                assert rank == index

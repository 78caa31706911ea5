"""The pass `apply_lora`: what adapters can change in a plan."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.weights.adapter_sites import AdapterSite, adapter_sites
from compile_and_serve.compiler.weights.adapter_slots import LinearSite
from compile_and_serve.compiler.weights.expert_slots import ExpertSite
from compile_and_serve.custom_ops.lora.lora_add import unblocked
from compile_and_serve.custom_ops.mesh import TENSOR
from compile_and_serve.models.spec import ModelSpec
from tests.models.test_registry import EXPERTS
from tests.support.rewriting import rewrite
from tests.support.tiny_models import tiny_spec


def sites_of(spec: ModelSpec, config: CompileConfig) -> dict[str, AdapterSite]:
    """The sites after all passes, by module."""
    captured, ctx, _ = rewrite(spec, config, verify=False)
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    transforms = [ctx.weights[node.meta["weight"]] for node in placeholders if "weight" in node.meta]
    return {site.module: site for site in adapter_sites(transforms)}


@pytest.mark.parametrize("lora_experts", [False, True])
def test_experts_take_adapters_only_if_asked(lora_experts: bool) -> None:
    spec = tiny_spec("Qwen3MoeForCausalLM", 1, torch.bfloat16, **EXPERTS["Qwen3MoeForCausalLM"])
    sites = sites_of(spec, CompileConfig(max_loras=2, max_lora_rank=4, lora_experts=lora_experts))
    experts = [module for module, site in sites.items() if isinstance(site, ExpertSite)]
    prefix = "model.layers.0.mlp.experts"
    assert sorted(experts) == ([f"{prefix}.down_proj", f"{prefix}.gate_up_proj"] if lora_experts else [])
    assert {"model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"} <= sites.keys()


def test_ranks_pad_a_vocabulary_that_they_do_not_divide_but_adapters_are_not_padded() -> None:
    ranks, vocab_size, rank = 4, 33, 4
    spec = tiny_spec("LlamaForCausalLM", 1, torch.bfloat16, vocab_size=vocab_size)
    config = CompileConfig(max_loras=2, max_lora_rank=rank, tensor_parallel_size=ranks)
    sites = sites_of(spec, config)
    head, embedding = sites["lm_head"], sites["model.embed_tokens"]
    assert (head.in_features, head.out_features) == (64, vocab_size)
    assert (embedding.in_features, embedding.out_features) == (vocab_size, 64)
    query = sites["model.layers.0.self_attn.q_proj"]
    assert (query.in_features, query.out_features) == (64, 64)
    assert isinstance(head, LinearSite)
    b_VR = torch.randn(vocab_size, rank)
    own = -(-vocab_size // ranks)
    parts = []
    for number in range(ranks):
        slot_a, slot_b = torch.zeros(rank, 64), torch.zeros(1, rank, 16)
        head.fill(slot_a, slot_b, torch.randn(rank, 64), b_VR, {TENSOR: number})
        parts.append(unblocked(slot_b)[:, :own].T)
    torch.testing.assert_close(torch.cat(parts)[:vocab_size], b_VR)

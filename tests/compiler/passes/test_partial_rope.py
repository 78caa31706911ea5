"""GLM-4-MoE's layers in the graph, with RoPE over a part of each head: the passes compute the same, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from tests.models.test_registry import EXPERTS
from tests.support.rewriting import check_verified, rewrite
from tests.support.tiny_models import tiny_spec

LAYERS = 3  # the first without experts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("quantization", [None, pytest.param("int8-weight-only", marks=pytest.mark.slow)])
def test_passes_are_verified(quantization: str | None, size: int) -> None:
    changes = EXPERTS["Glm4MoeForCausalLM"] | {"attention_bias": True}
    spec = tiny_spec("Glm4MoeForCausalLM", LAYERS, torch.bfloat16, **changes)
    config = CompileConfig(tensor_parallel_size=size, quantization=quantization)  # type: ignore[arg-type]
    captured, _, records = rewrite(spec, config)
    check_verified(records)
    fused = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.rope_attention.default)
    assert len(fused) == LAYERS
    assert not captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.attention.default)

"""DeepSeek's layers in the graph: the passes compute the same, verified in float64, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.rewrite.graph_pass import PassError
from tests.models.test_registry import EXPERTS
from tests.support.rewriting import check_verified, rewrite
from tests.support.tiny_models import tiny_spec

LAYERS = 3  # the first without experts


@pytest.mark.slow_cases
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_passes_are_verified(architecture: str, size: int) -> None:
    spec = tiny_spec(architecture, LAYERS, torch.bfloat16, **EXPERTS[architecture])
    captured, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=size))
    if size > 1:
        # queries and output; the MLP, or the shared experts and the others; embedding and head
        result = records["tensor_parallel"].result
        assert result is not None
        assert result.matched == (2 + 3) + 2 * (2 + 3 + 1) + 2
    check_verified(records)
    for node in captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.mla_attention.default):
        q_THE, kv_a, _, _, _, kv_b, cache = (arg.meta["example_value"] for arg in node.args[:7])
        assert q_THE.shape[1:] == (4 // size, 24)
        assert kv_a.shape[1] == cache.shape[2] == 40  # latents are whole on every rank
        assert kv_b.shape == (4 // size * (16 + 12), 32)


def test_heads_that_ranks_cannot_share() -> None:
    spec = tiny_spec("DeepseekV2ForCausalLM", 1, torch.bfloat16, **EXPERTS["DeepseekV2ForCausalLM"])
    with pytest.raises(PassError, match="it has 4 heads, which 3 does not divide"):
        rewrite(spec, CompileConfig(tensor_parallel_size=3), verify=False)

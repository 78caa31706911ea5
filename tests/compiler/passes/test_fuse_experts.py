"""Experts in the graph: their fusions and shards compute the same, verified in float64."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.rewrite.graph_pass import PassError, PassResult
from tests.compiler.passes.test_tensor_parallel import rewrite
from tests.models.test_registry import EXPERTS
from tests.support.tiny_models import tiny_spec

LAYERS = 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_passes_are_verified(architecture: str, size: int) -> None:
    spec = tiny_spec(architecture, LAYERS, torch.bfloat16, **EXPERTS[architecture])
    captured, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=size))
    shared = architecture.startswith("Qwen2")
    assert records["fuse_experts"].result == PassResult(matched=LAYERS)
    assert records["select_rows_early"].result == PassResult(matched=1)
    if size > 1:
        # attention, experts, and the shared expert's three linears; embedding and head
        assert records["tensor_parallel"].result == PassResult(matched=LAYERS * (5 + 3 * shared) + 2)
    for record in records.values():
        if record.verification is not None:
            assert record.verification.passed, record.verification.reason
    nodes = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default)
    assert len(nodes) == LAYERS
    for node in nodes:
        assert node.args[3].meta["example_value"].dim() == 4  # packed
        assert node.args[10] is not None  # the norm's weight
        assert (node.args[9] is not None) == (size == 1)  # with ranks, the sum over them comes first


def test_features_that_ranks_cannot_share() -> None:
    spec = tiny_spec(
        "Qwen3MoeForCausalLM", 1, torch.bfloat16, **EXPERTS["Qwen3MoeForCausalLM"] | {"moe_intermediate_size": 27}
    )
    with pytest.raises(PassError, match="it has 27 features in each expert, which 2 does not divide"):
        rewrite(spec, CompileConfig(tensor_parallel_size=2), verify=False)

"""The pass `fuse_allreduce_add_rms_norm`: every rowwise linear of a layer is a site, and what is none says why."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.fuse_allreduce_add_rms_norm import FuseAllreduceAddRmsNorm
from compile_and_serve.compiler.rewrite.graph_pass import PassResult, SkipReason
from tests.compiler.passes.test_tensor_parallel import LAYERS, run
from tests.support.rewriting import KERNELS, check_unchanged, check_verified, result_of

NAME = "fuse_allreduce_add_rms_norm"
FUSED = torch.ops.cas.allreduce_add_rms_norm.default
WITH_IT = KERNELS | {"allreduce_add_rms_norm"}


def test_every_sum_of_ranks_in_a_layer_is_a_site() -> None:
    """Two a layer, the last before the final norm; only the embedding's sum stays, and the norms are no linear's any more."""
    captured, ctx, records = run(2, "Qwen3ForCausalLM", kernels=WITH_IT)
    assert records[NAME].result == PassResult(matched=2 * LAYERS)
    check_verified(records, NAME)
    targets = [node.target for node in captured.gm.graph.nodes]
    assert targets.count(FUSED) == 2 * LAYERS
    assert targets.count(torch.ops.cas.all_reduce.default) == 1
    normed = [n.args[3] is not None for n in captured.gm.graph.nodes if n.target == torch.ops.cas.fused_linear.default]
    assert normed == [True] + [False] * (4 * LAYERS)  # the first layer's norm follows the embedding
    check_unchanged(captured, ctx, default_passes(CompileConfig(tensor_parallel_size=2)))


def test_it_runs_where_there_are_ranks_and_a_kernel() -> None:
    _, ctx, records = run(1, kernels=WITH_IT, verify=False)
    assert NAME not in records
    assert FuseAllreduceAddRmsNorm().guard(ctx) == SkipReason(sentence="the model runs on one rank")
    _, _, records = run(2, verify=False)
    assert records[NAME].result == SkipReason(sentence="there is no kernel for it for torch.bfloat16 on cpu")
    assert records["fuse_linears"].result == PassResult(matched=4 * LAYERS + 1)


class ScaledMlp(nn.Module):
    """Its output is scaled before it is added."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) * 0.5


def test_near_misses_say_why() -> None:
    def scaled(module: Any) -> None:
        for layer in module.model.layers:
            layer.mlp = ScaledMlp(layer.mlp)

    def float32_norm(module: Any) -> None:
        norm = module.model.layers[0].post_attention_layernorm
        norm.weight.data = norm.weight.data.float()

    for change, count, reason in (
        (scaled, LAYERS, "not read by a residual addition alone"),
        (float32_norm, 1, "the norm's weight is not a parameter of the activations' dtype"),
    ):
        _, _, records = run(2, kernels=WITH_IT, change=change)
        result = result_of(records, NAME)
        assert (result.matched, len(result.near_misses)) == (2 * LAYERS - count, count)
        assert reason in result.near_misses[0].reason
        assert "models/" in result.near_misses[0].source or "test_fuse" in result.near_misses[0].source

"""The pass `expert_parallel`: with whole experts on each rank, the graph computes what the whole one does, for every family."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.passes.expert_parallel import PLACEMENT
from compile_and_serve.compiler.rewrite.graph_pass import PassResult, SkipReason
from compile_and_serve.custom_ops.collectives.collectives import ALL_REDUCE
from compile_and_serve.custom_ops.collectives.tokens import GATHER_TOKENS, SCATTER_TOKENS
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.moe.placement import even_turns, first_experts, take_experts
from compile_and_serve.custom_ops.moe.turns import TURNS
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.runner.spread_experts import check_experts
from tests.models.test_registry import EXPERTS
from tests.support.moe_models import FAMILIES
from tests.support.rewriting import KERNELS, check_verified, rewrite
from tests.support.staged_engine import use_plain_pieces
from tests.support.tiny_models import tiny_spec
from tests.support.transformers_models import config_of

TENSOR_2, DATA_2 = Mesh(tensor=2, expert_parallel=True), Mesh(data=2, expert_parallel=True)
BOTH = Mesh(data=2, tensor=2, expert_parallel=True)
NATIVE = sorted(EXPERTS)
DTYPES = {"int8-weight-only": "int8", "fp8-block": "float8_e4m3fn"}
CLASSES = sorted(FAMILIES.keys() - EXPERTS.keys())


def run(architecture: str, mesh: Mesh, **options: Any) -> Any:
    """Every pass over a tiny model of two layers at least."""
    if architecture in EXPERTS:
        spec = tiny_spec(architecture, 2, torch.float32, **EXPERTS[architecture])
    else:
        settings = {name: value for name, value in FAMILIES[architecture].items() if value is not None}
        spec = build_model(config_of(architecture, **settings), dtype=torch.float32)
    config = CompileConfig(tensor_parallel_size=mesh.tensor, enable_expert_parallel=True, **options)
    return rewrite(spec, config, mesh=mesh)


MESHES = {"tensor": TENSOR_2, "data": DATA_2, "both": BOTH}
QUICK = (("Qwen3MoeForCausalLM", "both"), ("MixtralForCausalLM", "tensor"))
# The attention of the others is not sharded.
SHARDED = (*(one for one in NATIVE if one != "OlmoeForCausalLM"), "Llama4ForCausalLM")
CASES = [(name, mesh) for name in (*NATIVE, *CLASSES) for mesh in MESHES if mesh == "data" or name in SHARDED]


@pytest.mark.parametrize(("architecture", "over"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES])
@pytest.mark.exhaustive_cases(
    but=["Ernie4_5_MoeForCausalLM-data", "Llama4ForCausalLM-tensor", "GptOssForCausalLM-tensor", "DeepseekV2ForCausalLM-tensor"]
)
def test_spread_experts_equal_whole_ones(architecture: str, over: str) -> None:
    mesh = MESHES[over]
    captured, _, records = run(architecture, mesh)
    layers = records["expert_parallel"].result.matched
    assert layers >= 1
    check_verified(records, "expert_parallel")
    ops = [node.target for node in captured.gm.graph.nodes]
    assert ops.count(SCATTER_TOKENS) == layers * (mesh.data > 1)
    assert ops.count(GATHER_TOKENS) == 2 * layers * (mesh.data > 1)
    assert (ALL_REDUCE in ops) == (mesh.tensor > 1)
    tables = [one for one in captured.gm.graph.nodes if one.meta.get("weight", "").endswith(PLACEMENT)]
    assert len(tables) == layers


def test_a_rank_loads_its_experts_alone_and_whole() -> None:
    _, ctx, _ = run("Qwen3MoeForCausalLM", BOTH)
    weight = ctx.weights["model.layers.1.mlp.experts.gate_up_proj.packed"]
    assert weight.inputs == (("take_experts", "model.layers.1.mlp.experts.gate_up_proj", 1, 4),)
    stacked = torch.arange(6)[:, None].expand(6, 5)
    taken = [take_experts(stacked, 2, 4, rank=rank)[:, 0].tolist() for rank in range(4)]
    assert taken == [[0, 1], [2, 3], [4, 5], [0, 1]]


@pytest.mark.parametrize("quantization", ["int8-weight-only", pytest.param("fp8-block", marks=pytest.mark.slow)])
def test_quantized_experts_have_the_values_of_the_whole(quantization: Any) -> None:
    spec = tiny_spec("Qwen3MoeForCausalLM", 1, torch.bfloat16, **EXPERTS["Qwen3MoeForCausalLM"] | {"moe_intermediate_size": 128})
    config = CompileConfig(tensor_parallel_size=2, enable_expert_parallel=True, quantization=quantization)
    _, ctx, records = rewrite(spec, config, kernels=KERNELS | {"quantized_experts"})
    assert records["quantize_experts"].result == PassResult(matched=1)
    check_verified(records, "quantize_experts")
    (scale,) = ctx.weights.keep([f"model.layers.0.mlp.experts.down_proj.{DTYPES[quantization]}.scale"])
    assert scale.spec.shape[0] == 2


def test_an_expert_with_several_slots_shares_its_turns() -> None:
    assert first_experts(3, 2, 2) == [0, 1, 2, 0]
    slots_XC = even_turns([0, 1, 2, 0], 3)
    assert slots_XC.shape == (3, TURNS)
    assert slots_XC[0].tolist() == [0, 3] * (TURNS // 2)
    assert set(slots_XC[1].tolist()) == {1}


def test_a_model_without_experts_says_so() -> None:
    config = CompileConfig(tensor_parallel_size=2, enable_expert_parallel=True, mode="compile", use_cache=False)
    _, _, records = rewrite(tiny_spec(layers=1), config)
    assert records["expert_parallel"].result == PassResult(matched=0)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        use_plain_pieces(patch)
        model = compile_model(tiny_spec(layers=1), replace(config, work_dir=Path(folder)), device=torch.device("cpu"), dtype=torch.float32)
        with pytest.raises(ValueError, match="the model has no experts"):
            check_experts(model, config.mesh)


def test_without_other_ranks_nothing_is_spread() -> None:
    _, _, records = run("MixtralForCausalLM", Mesh(expert_parallel=True))
    assert isinstance(records["expert_parallel"].result, SkipReason)
    assert isinstance(records["fuse_experts"].result, PassResult)

"""`verify_passes`: right passes pass, a wrong one is named and left out, and the model still computes what it should."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult
from tests.support.tiny_models import caches, fill, step, tiny_spec
from tests.support.wrong_passes import DropsResidual

CPU = torch.device("cpu")
FUSED = frozenset({"rope_attention", "fused_linear", "silu_mul", "add_rms_norm"})


class Raises(BasePass):
    name = "raises"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        weight = gm.graph.find_nodes(op="placeholder")[-1]
        gm.graph.erase_node(next(n for n in reversed(gm.graph.nodes) if n.op == "output"))
        raise RuntimeError(f"cannot go on after {weight.op}")


class SwapsMergedWeights(BasePass):
    """Planted: derives a merged weight in the wrong order under the name that the right pass uses later."""

    name = "swaps_merged_weights"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        linear = gm.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)[0]
        q = linear.args[1]
        assert isinstance(q, torch.fx.Node)
        merged = ctx.derived_weight(gm, "model.layers.0.self_attn.q_proj+k_proj+v_proj.weight", "cat", q, q)
        with gm.graph.inserting_before(linear):
            half = ctx.call(gm, torch.neg, merged, origin=linear)
            narrow = ctx.call(gm, torch.narrow, half, 0, 0, q.meta["example_value"].shape[0], origin=linear)
        linear.replace_input_with(q, narrow)
        return PassResult(matched=1)


def make(tmp_path: Path, passes=None, architecture: str = "LlamaForCausalLM", kernels=FUSED, dtype=torch.float32, **config):
    spec = tiny_spec(architecture, 2, dtype, **config)
    options = CompileConfig(cache_dir=tmp_path, verify_passes=True)
    model = compile_model(spec, options, device=CPU, dtype=dtype, kernels=kernels, passes=passes)
    return spec, model


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["Llama"])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [("LlamaForCausalLM", {}), ("LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}), ("Qwen3ForCausalLM", {})],
)
def test_every_default_pass_is_right(tmp_path: Path, architecture: str, config: dict[str, bool]) -> None:
    _, model = make(tmp_path, architecture=architecture, dtype=torch.bfloat16, **config)
    rows = {row["name"]: row for row in model.report["passes"]}
    assert list(rows) == [p.name for p in default_passes()]
    for name, row in rows.items():
        assert row["verification"]["reason"] is None, name
        assert row["verification"]["relative_error"] < 1e-12
    sites = rows["fuse_rope_attention"]["verification"]["sites"]
    assert [site["node"] for site in sites[-3:]] == ["result", "kv_caches.0", "kv_caches.1"]
    assert "models/" in sites[0]["source"]
    assert model.report["failed_passes"] == {}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pieces of the right model are compiled once."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.slow_cases
@pytest.mark.parametrize("wrong", [DropsResidual, Raises, SwapsMergedWeights])
def test_wrong_pass_is_named_and_left_out(store: Path, wrong: type, caplog: pytest.LogCaptureFixture) -> None:
    planted = wrong()
    passes = list(default_passes())
    passes.insert(2, planted)
    with caplog.at_level(logging.ERROR):
        spec, model = make(store, passes)
    assert list(model.report["failed_passes"]) == [planted.name]
    assert f"pass {planted.name} failed its verification and is left out" in caplog.text
    rows = {row["name"]: row for row in model.report["passes"]}
    assert "failed its verification" in rows[planted.name]["skipped"]
    assert rows["fuse_linears"]["matched"] == 4 * 2 + 1  # what comes after it runs as if it had not been there
    eager = compile_model(tiny_spec(), CompileConfig(mode="eager"), device=CPU, dtype=torch.float32)
    fill(model)
    fill(eager)
    torch.testing.assert_close(
        step(model, [5, 6, 7, 8], 0, caches(spec, torch.float32)),
        step(eager, [5, 6, 7, 8], 0, caches(spec, torch.float32)),
        rtol=1e-4,
        atol=1e-4,
    )


def test_without_verification_the_planted_pass_does_its_harm(store: Path) -> None:
    """The control: it is the verifier that saves the answers above."""
    passes = list(default_passes())
    passes.insert(2, DropsResidual())
    model = compile_model(tiny_spec(), CompileConfig(cache_dir=store), device=CPU, dtype=torch.float32, kernels=FUSED, passes=passes)
    eager = compile_model(tiny_spec(), CompileConfig(mode="eager"), device=CPU, dtype=torch.float32)
    fill(model)
    fill(eager)
    ours, theirs = (step(m, [5, 6, 7, 8], 0, caches(tiny_spec(), torch.float32)) for m in (model, eager))
    assert (ours - theirs).abs().max() > 0.1


@pytest.mark.slow
def test_a_plan_with_a_pass_left_out_is_not_found_without_verification(store: Path) -> None:
    make(store)
    plain = compile_model(tiny_spec(), CompileConfig(cache_dir=store), device=CPU, dtype=torch.float32, kernels=FUSED)
    assert plain.report["artifact"] == "made"
    _, again = make(store)
    assert again.report["artifact"] == "hit"
    assert all(row["verification"]["reason"] is None for row in again.report["passes"])

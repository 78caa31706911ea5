"""Each pass: how many sites it matches, what it leaves alone and why, and that a second run finds nothing."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.fuse_add_rms_norm import FuseAddRmsNorm
from compile_and_serve.compiler.passes.fuse_linears import FuseLinears
from compile_and_serve.compiler.passes.fuse_rope_attention import FuseRopeAttention
from compile_and_serve.compiler.passes.fuse_silu_mul import FuseSiluMul
from compile_and_serve.compiler.rewrite.fusion_choice import FusionChoice
from compile_and_serve.compiler.rewrite.graph_pass import NORM_ADDS, PassContext, PassError, PassResult, SkipReason
from compile_and_serve.models.registry import build_model
from tests.support.rewriting import KERNELS, check_unchanged, check_verified, result_of, rewrite
from tests.support.tiny_models import tiny_spec

LAYERS = 3
ALL_KERNELS = KERNELS | {"silu_mul", "add_rms_norm"}
PASSES = default_passes()


def run(architecture: str = "LlamaForCausalLM", model: dict[str, object] | None = None, **options: Any) -> Any:
    spec = tiny_spec(architecture, LAYERS, torch.bfloat16, **(model or {}))
    return rewrite(spec, **{"kernels": ALL_KERNELS, "verify": False, **options})


def targets(captured: CapturedGraph) -> list[object]:
    return [node.target for node in captured.gm.graph.nodes if node.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_every_site_is_matched(architecture: str) -> None:
    captured, _, records = run(architecture)
    expected = {"merge_linears": 5 * LAYERS, "select_rows_early": 1, "fuse_rope_attention": LAYERS, "fuse_linears": 4 * LAYERS + 1}
    for name, sites in expected.items():
        assert records[name].result == PassResult(matched=sites), name
    left = targets(captured)
    assert F.linear not in left
    assert torch.rms_norm not in left
    assert F.silu not in left


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_second_run_changes_nothing(architecture: str) -> None:
    captured, ctx, _ = run(architecture)
    check_unchanged(captured, ctx, PASSES)


def test_merged_weights_come_from_their_parts() -> None:
    _, ctx, _ = run()
    qkv = ctx.weights["model.layers.1.self_attn.q_proj+k_proj+v_proj.weight.packed"]
    prefix = "model.layers.1.self_attn"
    assert qkv.sources == tuple(f"{prefix}.{part}_proj.weight" for part in "qkv")
    assert qkv.expression == ("pack_linear_weight", ("cat", *qkv.sources))


def test_biases_are_merged_too() -> None:
    _, ctx, records = run(model={"attention_bias": True})
    assert records["merge_linears"].result == PassResult(matched=5 * LAYERS)
    assert ctx.weights["model.layers.0.self_attn.q_proj+k_proj+v_proj.bias"].spec.shape == (64 + 2 * 32,)


WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": 32,
    "num_mel_bins": 8,
    "d_model": 32,
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))
    },
    "max_source_positions": 12,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
}


def test_a_linear_without_a_bias_gets_zeros_beside_others_with_one() -> None:
    """Whisper's keys have no bias. The verifier compares the results."""
    spec = build_model(WHISPER, dtype=torch.float32).encoder
    assert spec is not None
    captured, ctx, records = rewrite(spec, dtype=torch.float32, kernels=ALL_KERNELS)
    check_verified(records, "merge_linears")
    assert records["merge_linears"].result == PassResult(matched=2 * 3 + 2 * 2)  # of two layers, and for two layers of the decoder
    assert targets(captured).count(torch.ops.cas.fused_linear.default) == 2 * (1 + 3) + 2 + 3  # and the convolutions
    prefix = "encoder.layers.1.self_attn"
    bias = ctx.weights[f"{prefix}.q_proj+k_proj+v_proj.bias"]
    q, v = torch.randn(32), torch.randn(32)
    assert bias.sources == (f"{prefix}.q_proj.bias", f"{prefix}.v_proj.bias")
    assert bias.fn(q, v).equal(torch.cat([q, torch.zeros(32), v]))
    assert ctx.weights["cross.0.k_proj+v_proj.bias"].fn(v).equal(torch.cat([torch.zeros(32), v]))


def test_rows_are_selected_before_the_last_mlp() -> None:
    captured, _, _ = run(kernels=frozenset())
    selections = [
        n
        for n in captured.gm.graph.find_nodes(op="call_function", target=operator.getitem)
        if len(n.args[1:]) and isinstance(n.args[1], torch.fx.Node)
    ]
    assert len(selections) == 2  # of the last attention's output and of the residual beside it
    linears = captured.gm.graph.find_nodes(op="call_function", target=F.linear)
    rows = str(selections[0].meta["example_value"].shape[0])
    on_rows = [str(node.meta["example_value"].shape[0]) == rows for node in linears]
    assert on_rows == [False] * (len(linears) - 4) + [True] * 4  # output projection, gate/up, down, head


def test_without_kernels_the_fusions_say_why() -> None:
    captured, _, records = run(kernels=frozenset())
    for name in ("fuse_rope_attention", "fuse_linears"):
        result = records[name].result
        assert isinstance(result, SkipReason)
        assert "bfloat16 on cpu" in result.sentence
    assert targets(captured).count(torch.ops.cas.attention.default) == LAYERS


def test_a_pass_is_turned_off_by_name() -> None:
    _, _, records = run(disabled=frozenset({"fuse_linears"}))
    assert records["fuse_linears"].result == SkipReason(sentence="turned off by name")


def test_float32_norm_weight_is_a_near_miss_with_its_place() -> None:
    def float32_norms(module: torch.nn.Module) -> None:
        for layer in module.model.layers:
            layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.float()

    _, _, records = run(change=float32_norms)
    result = result_of(records, "fuse_linears")
    assert len(result.near_misses) == LAYERS
    assert "different dtypes (torch.float32 and torch.bfloat16)" in result.near_misses[0].reason
    assert "models/families/llama.py:" in result.near_misses[0].source


WITHOUT_LINEARS = frozenset({"fuse_linears"})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_row_wise_ops_are_fused_where_no_linear_takes_them(architecture: str) -> None:
    captured, ctx, records = run(architecture, disabled=WITHOUT_LINEARS)
    assert records["fuse_silu_mul"].result == PassResult(matched=LAYERS, measured=("fused without measuring",))
    # every norm but the first stands behind a residual add
    assert records["fuse_add_rms_norm"].result == PassResult(matched=2 * LAYERS, measured=("fused without measuring",))
    assert targets(captured).count(F.silu) == 0
    assert targets(captured).count(torch.rms_norm) == 1
    check_unchanged(captured, ctx, PASSES, WITHOUT_LINEARS)
    _, _, with_linears = run(architecture)
    assert with_linears["fuse_silu_mul"].result == with_linears["fuse_add_rms_norm"].result == PassResult(matched=0)


class LosesAlways:
    def choose(self, *_: object) -> FusionChoice:
        return FusionChoice(use_ours=False, ours=(2e-6,), inductor=(1e-6,))


def test_what_was_measured_slower_is_left_with_its_reason() -> None:
    captured, ctx, _ = run(disabled=WITHOUT_LINEARS | {"fuse_silu_mul", "fuse_add_rms_norm"})
    ctx.tuner = LosesAlways()  # type: ignore[assignment]
    before = str(captured.gm.graph)
    for graph_pass, sites in ((FuseSiluMul(), LAYERS), (FuseAddRmsNorm(), 2 * LAYERS)):
        result = graph_pass.run(captured.gm, ctx)
        assert (result.matched, result.near_misses) == (0, ())
        assert len(result.left_to_inductor) == sites
        assert "100% slower than Inductor's code" in result.left_to_inductor[0].reason
        assert "models/" in result.left_to_inductor[0].source
    assert str(captured.gm.graph) == before


def test_a_float32_norm_behind_an_add_is_left_alone() -> None:
    def float32_norms(module: torch.nn.Module) -> None:
        for layer in module.model.layers:
            layer.post_attention_layernorm.weight.data = layer.post_attention_layernorm.weight.data.float()

    _, _, records = run(disabled=WITHOUT_LINEARS, change=float32_norms)
    result = result_of(records, "fuse_add_rms_norm")
    assert (result.matched, len(result.near_misses)) == (LAYERS, LAYERS)
    assert "the norm's weight is torch.float32, and its input torch.bfloat16" in result.near_misses[0].reason


def test_a_gate_that_something_else_reads_keeps_its_ops() -> None:
    captured, ctx, _ = run(disabled=WITHOUT_LINEARS | {"fuse_silu_mul"})
    silu = captured.gm.graph.find_nodes(op="call_function", target=F.silu)[0]
    with captured.gm.graph.inserting_after(silu):
        extra = ctx.call(captured.gm, torch.neg, silu.args[0], origin=silu)
    product = next(user for user in silu.users if user.target is torch.mul)
    product.replace_input_with(product.args[1], extra)
    result = FuseSiluMul().run(captured.gm, ctx)
    assert (result.matched, len(result.near_misses)) == (LAYERS - 1, 1)


def test_a_linear_with_two_readers_keeps_its_output() -> None:
    """SiLU-mul is swallowed only where nothing else reads the gate/up product."""
    captured, ctx, _ = run(disabled=WITHOUT_LINEARS | {"fuse_silu_mul", "fuse_add_rms_norm"})
    silus = captured.gm.graph.find_nodes(op="call_function", target=F.silu)
    with captured.gm.graph.inserting_after(silus[0]):
        extra = ctx.call(captured.gm, torch.neg, silus[0], origin=silus[0])
    products = [user for user in silus[0].users if user.target is torch.mul]
    products[0].replace_input_with(products[0].args[1], extra)
    FuseLinears().run(captured.gm, ctx)
    captured.gm.graph.lint()
    assert targets(captured).count(F.silu) == 1


def rotations(captured: CapturedGraph, layer: int) -> tuple[torch.fx.Node, torch.fx.Node]:
    """x·cos + rotate_half(x)·sin of a layer's queries and of its keys."""
    attention = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.attention.default)[layer]
    return attention.args[0], attention.args[1]


def negate_cos(captured: CapturedGraph, ctx: PassContext, *rotated: torch.fx.Node) -> torch.fx.Node:
    """Give the rotations another cosine, which is returned."""
    factors = [next(arg for arg in node.args[0].args if arg.target is torch.unsqueeze) for node in rotated]
    with captured.gm.graph.inserting_before(min(node.args[0] for node in rotated)):
        other = ctx.call(captured.gm, torch.neg, factors[0].args[0], origin=factors[0])
        factor = ctx.call(captured.gm, torch.unsqueeze, other, 1, origin=factors[0])
    for node, old in zip(rotated, factors, strict=True):
        node.args[0].replace_input_with(old, factor)
    return other


WITHOUT_ROPE = frozenset({"fuse_rope_attention", "fuse_linears"})


def test_each_site_keeps_its_own_angles() -> None:
    """As in models whose local layers rotate by other angles than their global ones."""
    captured, ctx, _ = run(disabled=WITHOUT_ROPE)
    other = negate_cos(captured, ctx, *rotations(captured, 1))
    result = FuseRopeAttention().run(captured.gm, ctx)
    assert result == PassResult(matched=LAYERS)
    captured.gm.graph.lint()
    fused = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.rope_attention.default)
    cosines, sines = [node.args[1] for node in fused], [node.args[2] for node in fused]
    assert cosines == [other.args[0], other, other.args[0]]
    assert len(set(sines)) == 1
    assert sines[0] not in cosines


def test_queries_and_keys_of_different_angles_are_a_near_miss() -> None:
    captured, ctx, _ = run(disabled=WITHOUT_ROPE)
    negate_cos(captured, ctx, rotations(captured, 1)[1])
    result = FuseRopeAttention().run(captured.gm, ctx)
    assert (result.matched, [miss.reason for miss in result.near_misses]) == (
        LAYERS - 1,
        ["queries and keys are rotated by different angles"],
    )


def test_a_residual_of_another_dtype_is_added_after_the_linear() -> None:
    captured, ctx, _ = run(disabled=WITHOUT_LINEARS | {"fuse_silu_mul", "fuse_add_rms_norm"})
    [o_proj, *_] = [node for node in captured.gm.graph.find_nodes(op="call_function", target=F.linear) if "o_proj" in str(node.args[1])]
    [add] = o_proj.users
    assert add.target is torch.add
    residual = next(arg for arg in add.args if arg is not o_proj)
    with captured.gm.graph.inserting_before(add):
        wide = ctx.call(captured.gm, torch.Tensor.float, residual, origin=add)
    add.replace_input_with(residual, wide)
    FuseLinears().run(captured.gm, ctx)
    captured.gm.graph.lint()
    fused = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.fused_linear.default)
    with_residual = [node for node in fused if node.args[7] is not None]
    assert len(with_residual) == 2 * LAYERS - 1
    assert wide not in [node.args[7] for node in fused]
    assert list(wide.users) == [add]


BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(("kernels", "in_linears"), [(ALL_KERNELS, 4), (ALL_KERNELS | {NORM_ADDS}, 0)])
def test_a_layer_norm_takes_the_residual_where_that_is_faster(kernels: frozenset[str], in_linears: int) -> None:
    captured, _, records = rewrite(build_model(BERT, dtype=torch.bfloat16), kernels=kernels, verify=False)
    fused = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.fused_linear.default)
    assert len(fused) == result_of(records, "fuse_linears").matched == 2 * 4  # queries, keys and values are one
    assert sum(node.args[7] is not None for node in fused) == in_linears
    norms = captured.gm.graph.find_nodes(op="call_function", target=F.layer_norm)[1:]  # behind the embeddings'
    assert [norm.args[0].target is torch.add for norm in norms] == [in_linears == 0] * 4


def test_a_pass_that_others_need_cannot_be_disabled() -> None:
    with pytest.raises(PassError, match="Pass canonicalize cannot be left out here: turned off by name"):
        run(disabled=frozenset({"canonicalize"}))

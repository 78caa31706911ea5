"""The pass `tensor_parallel`: a sharded graph computes what the whole one does, on every rank, whatever sizes and plan say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.shard_functions import first_row, shard_columns, shard_parts, shard_rows
from compile_and_serve.compiler.passes.tensor_parallel import TensorParallel
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassError, PassResult, SkipReason, tensor_of, weight_of
from compile_and_serve.compiler.weights.transforms import depends_on_rank
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.collectives.collectives import ALL_REDUCE
from compile_and_serve.custom_ops.mesh import DATA, AlongAxis, Mesh
from compile_and_serve.custom_ops.weight_functions import WEIGHT_FUNCTIONS, weight_function
from compile_and_serve.models.registry import build_model
from tests.support.recurrent_models import FAMILIES
from tests.support.rewriting import check_unchanged, check_verified, result_of, rewrite
from tests.support.tiny_models import tiny_spec
from tests.support.transformers_models import config_of

LAYERS = 2
SITES = 7 * LAYERS + 2  # linears of a layer, embedding and head


def run(size: int, architecture: str = "LlamaForCausalLM", model: dict[str, Any] | None = None, **options: Any) -> Any:
    """Every pass over a tiny model for `size` ranks. options: of `rewrite`."""
    spec = tiny_spec(architecture, LAYERS, torch.bfloat16, **(model or {}))
    return rewrite(spec, CompileConfig(tensor_parallel_size=size), **options)


CASES = {
    "llama": (2, "LlamaForCausalLM", {}),
    "llama-biases": (4, "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (2, "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-odd-vocabulary": (4, "LlamaForCausalLM", {"vocab_size": 33}),  # 9 tokens a rank, 6 on the last
    "llama-one-kv-head": (2, "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-8-heads": (4, "LlamaForCausalLM", {"num_attention_heads": 8, "head_dim": 8}),
    "qwen3": (2, "Qwen3ForCausalLM", {}),
    "qwen3-everything": (4, "Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "vocab_size": 35, "head_dim": 32}),
}


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["llama-biases", "llama-odd-vocabulary", "llama-one-kv-head", "qwen3-everything"])
@pytest.mark.parametrize("case", CASES)
def test_sharded_equals_unsharded(case: str) -> None:
    """In float64, attention by attention, and what the ranks' caches hold together."""
    size, architecture, config = CASES[case]
    _, _, records = run(size, architecture, config)
    assert records["tensor_parallel"].result == PassResult(matched=SITES)
    assert all((record.verification is None) == isinstance(record.result, SkipReason) for record in records.values())  # has no kernel
    verification = check_verified(records, "tensor_parallel")
    assert len(verification.sites) == LAYERS + 1 + LAYERS  # attentions, the result, caches
    assert records["fuse_linears"].result == PassResult(matched=4 * LAYERS + 1)
    assert records["fuse_rope_attention"].result == PassResult(matched=LAYERS)
    assert records["select_rows_early"].result == PassResult(matched=1)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["FalconH1", "KimiLinear", "Qwen3Next"])
@pytest.mark.parametrize(
    "architecture, size",
    [
        ("Lfm2ForCausalLM", 4),
        ("Qwen3_5ForCausalLM", 4),
        ("Qwen3NextForCausalLM", 2),
        ("FalconH1ForCausalLM", 2),
        ("Mamba2ForCausalLM", 4),
        ("MambaForCausalLM", 2),
        ("OlmoHybridForCausalLM", 2),
        ("KimiLinearForCausalLM", 2),
    ],
)
def test_recurrent_layers_are_shared_by_heads(architecture: str, size: int) -> None:
    """Parts of one projection and one convolution, keys that ranks share, a norm over all ranks, and parameters of elementwise ops."""
    config = config_of(architecture, **{**FAMILIES[architecture], "num_hidden_layers": 2, "layer_types": None})
    spec = build_model(config | {"full_attn_idxs": [1]}, dtype=torch.float32)
    _, ctx, records = rewrite(spec, CompileConfig(tensor_parallel_size=size))
    check_verified(records, "tensor_parallel")
    mixers = ("linear_attn.", "conv.", "mamba.", "mixer.", *(["self_attn."] if architecture.startswith("Kimi") else []))
    named = [name for name, _ in spec.module.named_parameters() if any(one in name for one in mixers)]
    whole = [name for name in named if not depends_on_rank(ctx.weights[name].expression)]
    assert len(named) > len(whole)
    of_one_head = ("linear_attn.norm.weight", "o_norm.weight", "f_a_proj.weight", "g_a_proj.weight")
    assert all(name.endswith(of_one_head) for name in whole)


def test_experts_without_a_gate_are_shared_by_features() -> None:
    sizes = {**FAMILIES["NemotronHForCausalLM"], "layers_block_type": ["linear_attention", "moe"], "moe_latent_size": None}
    spec = build_model(config_of("NemotronHForCausalLM", **sizes), dtype=torch.float32)
    _, ctx, records = rewrite(spec, CompileConfig(tensor_parallel_size=2))
    check_verified(records, "tensor_parallel")
    of_experts = [name for name, _ in spec.module.named_parameters() if ".experts." in name]
    assert len(of_experts) == 2
    assert all(depends_on_rank(ctx.weights[name].expression) for name in of_experts)


def test_a_share_of_parts_may_be_had_by_several_ranks() -> None:
    weight_O = torch.arange(12)
    shares = [shard_parts(weight_O, 4, 8, 4, 4, 2, rank=rank).tolist() for rank in range(4)]
    assert shares == [[0, 1, 8, 9], [2, 3, 8, 9], [4, 5, 10, 11], [6, 7, 10, 11]]
    with pytest.raises(ValueError, match="5 rows cannot be shared in parts of"):
        shard_parts(weight_O[:5], 4, 8, 4, 4, 2, rank=0)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["GPTNeoX"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_unmodified_transformers_models_are_sharded(architecture: str) -> None:
    """Heads are transposed there, and GPT-NeoX's queries, keys and values are one linear, head by head."""
    spec = build_model(config_of(architecture, num_hidden_layers=1), dtype=torch.bfloat16, model_impl="transformers")
    _, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=2))
    sites = 9 if architecture == "LlamaForCausalLM" else 6
    assert records["tensor_parallel"].result == PassResult(matched=sites)
    verification = check_verified(records, "tensor_parallel")
    assert len(verification.sites) == 3


@pytest.mark.parametrize("quantization", ["fp8", "int8-weight-only"])
def test_quantized_shards_have_the_values_of_the_whole(quantization: Any) -> None:
    spec = tiny_spec("Qwen3ForCausalLM", LAYERS, torch.bfloat16)
    _, ctx, records = rewrite(spec, CompileConfig(tensor_parallel_size=4, quantization=quantization))
    check_verified(records, "quantize_linears")
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS + (quantization == "int8-weight-only"))
    dtype = "float8_e4m3fn" if quantization == "fp8" else "int8"
    weight = ctx.weights[f"model.layers.0.self_attn.o_proj.weight.{dtype}.scale"]
    assert weight.expression == ("row_scales", "model.layers.0.self_attn.o_proj.weight", getattr(torch, dtype))  # of whole rows
    assert weight.spec.shape == (64,)
    rows = ("shard_rows", "model.layers.0.mlp.gate_proj.weight", 4, 4)  # nothing else of it is read
    merged = ctx.weights[f"model.layers.0.mlp.gate_proj+up_proj.weight.{dtype}.packed"]
    assert merged.inputs == (rows, ("shard_rows", "model.layers.0.mlp.up_proj.weight", 4, 4))


def test_shards_are_expressions_over_the_checkpoint() -> None:
    captured, ctx, _ = run(4, verify=False, model={"attention_bias": True})
    qkv = ctx.weights["model.layers.1.self_attn.q_proj+k_proj+v_proj.weight.packed"]
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    shards = [("shard_rows", name, parts, 4) for name, parts in zip(names, (4, 2, 2), strict=True)]  # 2 key/value heads
    assert qkv.expression == ("pack_linear_weight", ("cat", *shards))
    assert qkv.inputs == tuple(shards)
    assert qkv.sources == tuple(names)
    assert ctx.weights["model.layers.0.self_attn.o_proj.bias"].expression == ("on_first_rank", "model.layers.0.self_attn.o_proj.bias")
    caches = [n for n in captured.gm.graph.find_nodes(op="placeholder") if n.meta.get("input", "").startswith("kv_cache")]
    assert [tuple(node.meta["example_value"].shape) for node in caches] == [(8, 2, 1, 16, 16)] * LAYERS


def test_every_row_is_on_one_rank_and_padding_is_zero() -> None:
    weight = torch.randn(10, 3)
    rows = torch.cat([shard_rows(weight, 4, 4, rank=rank) for rank in range(4)])
    assert torch.equal(rows, torch.cat([weight, torch.zeros(2, 3)]))
    assert [first_row(weight, 4, rank=rank).item() for rank in range(4)] == [0, 3, 6, 9]
    assert torch.equal(shard_rows(weight, 2, 4, rank=1), weight[:5])  # two ranks share a half
    assert torch.equal(torch.cat([shard_columns(weight.T, 5, rank=rank) for rank in range(5)], 1), weight.T)
    assert torch.equal(shard_rows(weight[:2], 4, 4, rank=3), torch.zeros(1, 3))  # nothing is left for the last


def test_one_rank_needs_nothing() -> None:
    captured, ctx, records = run(1, verify=False)
    assert "tensor_parallel" not in records
    assert "cas.all" not in str(captured.gm.graph)
    assert TensorParallel().guard(ctx) == SkipReason(sentence="the model runs on one rank")


def test_a_second_run_changes_nothing() -> None:
    captured, ctx, _ = run(2, verify=False, model={"tie_word_embeddings": True})
    check_unchanged(captured, ctx, default_passes(CompileConfig(tensor_parallel_size=2)))


def test_a_module_without_a_plan_is_whole_on_every_rank_and_listed() -> None:
    def without_mlp(plan: dict[str, str]) -> dict[str, str]:
        return {pattern: style for pattern, style in plan.items() if ".mlp." not in pattern and pattern != "lm_head"}

    _, ctx, records = run(2, plan=without_mlp)
    result = result_of(records, "tensor_parallel")
    assert result.matched == 4 * LAYERS + 1
    assert len(result.near_misses) == 3 * LAYERS + 1
    assert "tp_plan has no model.layers.0.mlp.gate_proj: its weight is whole" in result.near_misses[0].reason
    assert "models/layers.py:" in result.near_misses[0].source
    check_verified(records, "tensor_parallel")
    assert ctx.weights["lm_head.weight"].expression == "lm_head.weight"


@pytest.mark.parametrize(
    ("size", "config", "message"),
    [
        (
            3,
            {},
            "model.layers.0.self_attn.q_proj.weight cannot be shared by 3 tensor-parallel ranks: it has 4 heads, which "
            "3 does not divide; sizes that fit this model: 1, 2, 4.",
        ),
        (8, {"num_attention_heads": 24, "num_key_value_heads": 6}, "k_proj.weight cannot be shared by 8 .* has 6 heads"),
        (4, {"intermediate_size": 90}, "mlp.gate_proj.weight cannot be shared by 4 .* it has 90 rows"),
    ],
)
def test_sizes_that_do_not_divide_name_the_parameter(size: int, config: dict[str, int], message: str) -> None:
    with pytest.raises(PassError, match=message):
        run(size, model=config, verify=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.*.mlp.down_proj": "colwise"}, "down_proj.weight is 'colwise' in the model's tp_plan, and its input is a shard"),
        ({"model.layers.*.mlp.gate_proj": "rowwise"}, "gate_proj.weight is 'rowwise' .* its input is whole"),
        ({"lm_head": "colwise"}, "result would be a shard"),
        ({"model.embed_tokens": "colwise"}, "embed_tokens.weight is 'colwise' in the model's tp_plan: expected 'vocab'"),
        ({"model.layers.*.mlp.up_proj": "diagonal"}, "up_proj.weight is 'diagonal' in the model's tp_plan: expected 'colwise' or"),
    ],
)
def test_a_plan_that_does_not_go_together_is_an_error(changes: dict[str, str], message: str) -> None:
    with pytest.raises(PassError, match=message):
        run(2, verify=False, plan=lambda plan: plan | changes)


class NormalizedMlp(nn.Module):
    """Takes a norm over features that ranks would share."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.softmax(self.gate_proj(x), -1) * self.up_proj(x))


class WrittenOutMlp(NormalizedMlp):
    """Knows how many features there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gate_proj(x) * self.up_proj(x)
        return self.down_proj(hidden.view(x.shape[0], 2, 48).flatten(1))


class CutGroupsMlp(NormalizedMlp):
    """Knows how many groups there are and leaves their size open."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gate_proj(x) * self.up_proj(x)
        return self.down_proj(hidden.view(x.shape[0], 2, -1).flatten(1))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("mlp", "message"),
    [
        (CutGroupsMlp, r"test_tensor_parallel.py:\d+, in forward does not run on a shard: should a constant size be -1"),
        (NormalizedMlp, r"cannot follow softmax at .*test_tensor_parallel.py:\d+, in forward: dimension 1 of its input is sharded over"),
        (WrittenOutMlp, r"test_tensor_parallel.py:\d+, in forward does not run on a shard .* should a constant size be -1"),
    ],
)
def test_what_cannot_be_sharded_is_an_error_with_its_place(mlp: type, message: str) -> None:
    def change(module: Any) -> None:
        for layer in module.model.layers:
            layer.mlp = mlp(layer.mlp)

    with pytest.raises(PassError, match=message):
        run(2, verify=False, change=change)


def test_an_attention_that_is_not_sharded_is_an_error() -> None:
    """Each rank's KV cache has its own heads alone."""
    with pytest.raises(PassError, match="does not shard the attention of any layer.* tensor parallel size of 1"):
        run(2, verify=False, plan=lambda plan: {})
    with pytest.raises(PassError, match=r"does not shard the attention of .*models/families/llama.py:\d+"):
        run(2, verify=False, plan=lambda plan: {name: style for name, style in plan.items() if ".mlp." in name})


def test_the_pass_cannot_be_left_out() -> None:
    with pytest.raises(PassError, match="Pass tensor_parallel cannot be left out here: turned off by name"):
        run(2, verify=False, disabled=frozenset({"tensor_parallel"}))


def test_a_wrong_shard_fails_the_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes the first columns: the ranks' sum is wrong, and no unsharded graph is left to fall back to."""
    wrong = lambda weight, size, *, rank: shard_columns(weight, size, rank=0)  # noqa: E731
    monkeypatch.setitem(WEIGHT_FUNCTIONS, "shard_columns", replace(WEIGHT_FUNCTIONS["shard_columns"], call=wrong))
    with pytest.raises(PassError, match="tensor_parallel cannot be left out here: failed its verification, relative error"):
        run(2)


ALONG_DATA = AlongAxis("rowwise", DATA)


@weight_function("test_on_first_data_rank", axis=DATA)
def on_first_data_rank(weight: torch.Tensor, *, rank: int) -> torch.Tensor:
    return weight if rank == 0 else torch.zeros_like(weight)


class SumOverDataRanks(BasePass):
    """F.linear(x, W) → all_reduce(F.linear(x, W on the first rank)) over the data axis, as the plan says."""

    name = "sum_over_data_ranks"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched = 0
        for node in gm.graph.find_nodes(op="call_function", target=F.linear):
            name = weight_of(node.args[1])
            assert name is not None
            if depends_on_rank(ctx.weights[name].expression) or ctx.tp_plan.get(name.removesuffix(".weight")) != ALONG_DATA:
                continue
            ctx.replace_weight(node.args[1], "test_on_first_data_rank")
            with gm.graph.inserting_after(node):
                total = ctx.call(gm, ALL_REDUCE, node, DATA, origin=node)
            node.replace_all_uses_with(total, lambda user, total=total: user is not total)
            matched += 1
        return PassResult(matched=matched)


def test_weights_along_another_axis_are_left_to_its_pass() -> None:
    """Attention is sharded over two ranks, and each of them adds up an MLP with a rank of the other axis."""
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in range(LAYERS)]

    def plan(styles: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(down, ALONG_DATA) | {name: style for name, style in styles.items() if ".mlp." not in name}

    passes = [TensorParallel(), SumOverDataRanks()]
    before = [one for one in default_passes() if one.name in ("functionalize", "canonicalize", "drop_batch_axis", "eliminate_noops")]
    _, _, records = run(2, passes=[*before, *passes], plan=plan, mesh=Mesh(pipe=3, data=2, tensor=2))
    assert result_of(records, "tensor_parallel").matched == SITES - 3 * LAYERS
    assert result_of(records, "sum_over_data_ranks").matched == LAYERS
    for one in passes:
        assert len(check_verified(records, one.name).sites) == LAYERS + 1 + LAYERS


class SinksAttention(nn.Module):
    """Llama's attention with a sink for each head, and slopes."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        self.head_dim, self.scale = attention.head_dim, attention.scale
        heads = self.q_proj.weight.shape[0] // self.head_dim
        self.sinks, self.slopes = (nn.Parameter(torch.empty(heads, device="meta").bfloat16()) for _ in range(2))

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x_TD).view(x_TD.shape[0], -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = attention(q, k, v, kv_cache, self.scale, soft_cap=3.0, sinks_H=self.sinks, alibi_slopes_H=self.slopes)
        return self.o_proj(out.flatten(1))


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_the_sinks_and_slopes_of_its_heads(size: int) -> None:
    def add_sinks(module: Any) -> None:
        for layer in module.model.layers:
            layer.self_attn = SinksAttention(layer.self_attn)

    captured, _, records = run(size, change=add_sinks)
    check_verified(records, "tensor_parallel")
    nodes = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.attention.default)
    assert [tensor_of(vector).shape[0] for node in nodes for vector in node.args[7:9]] == [4 // size] * 2 * LAYERS

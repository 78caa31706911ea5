"""`quantize_linears`: which linears, what becomes of merged and tied weights, what it leaves alone and why, and the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.artifacts.cache_key import plan_fields
from compile_and_serve.compiler.config import Quantization
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.quantize_linears import SCHEMES, QuantizeLinears
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassResult, SkipReason, op_arguments
from compile_and_serve.custom_ops.quantized.group_linear import GROUP_LINEAR
from compile_and_serve.custom_ops.quantized.quantized_linear import QUANTIZED_LINEAR
from tests.support.numbers import relative_error
from tests.support.rewriting import KERNELS, check_unchanged, check_verified, result_of, rewrite
from tests.support.tiny_models import caches, fill, step, tiny_spec

CPU = torch.device("cpu")
LAYERS = 2
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}


def run(architecture="LlamaForCausalLM", model=None, ranks=1, **options):
    """options: of `rewrite`, or of the config."""
    spec = tiny_spec(architecture, LAYERS, torch.bfloat16, **(model or {}))
    given = {name: options.pop(name) for name in ("change", "disabled", "passes") if name in options}
    verify = options.pop("verify", False)
    return rewrite(spec, CompileConfig(tensor_parallel_size=ranks, **options), verify=verify, **given)


@pytest.mark.slow_cases
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.group_size is None])
def test_every_linear_but_the_head_is_matched(scheme: str, architecture: str) -> None:
    captured, ctx, records = run(architecture, quantization=scheme, model=WIDE)
    head = 1 if scheme == "int8-weight-only" else 0
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS + head)
    assert records["fuse_linears"].result == PassResult(matched=4 * LAYERS + 1)
    nodes = captured.gm.graph.find_nodes(op="call_function", target=QUANTIZED_LINEAR)
    assert len(nodes) == 4 * LAYERS + head
    left = {node.target for node in captured.gm.graph.nodes}
    assert not left & {F.linear, F.silu, torch.rms_norm}
    expected = SCHEMES[scheme]
    for node in nodes:
        x, packed, scale, out_features, *_, activations, input_scale, _, _ = op_arguments(node).values()
        assert packed.meta["example_value"].dtype == expected.dtype
        assert ctx.weights[scale.meta["weight"]].spec.dtype == torch.float32
        features = x.meta["example_value"].shape[1]
        shape = (out_features // 128, features // 128) if expected.scales == "block" else (out_features,)
        assert ctx.weights[scale.meta["weight"]].spec.shape == shape
        assert (activations, input_scale) == (expected.activations, None)
    assert sum(node.args[7] for node in nodes) == LAYERS
    check_unchanged(captured, ctx, default_passes(CompileConfig(quantization=scheme)))


def test_int4_has_groups_and_a_head_of_8_bits() -> None:
    captured, ctx, records = run(quantization="int4", model=WIDE)
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS + 1)
    assert records["fuse_linears"].result == PassResult(matched=4 * LAYERS + 1)
    head, *others = reversed(captured.gm.graph.find_nodes(op="call_function", target=GROUP_LINEAR))
    assert len(others) == 4 * LAYERS
    for node, bits, scales in ((head, 8, torch.float32), *((other, 4, torch.float16) for other in others)):
        args = op_arguments(node)
        assert (args["bits"], args["group_size"], args["table"]) == (bits, 32, "")
        assert [ctx.weights[args[name].meta["weight"]].spec.dtype for name in ("scale", "offset")] == [scales, scales]
    check_unchanged(captured, ctx, default_passes(CompileConfig(quantization="int4")))


def test_nothing_happens_unasked() -> None:
    captured, _, records = run()
    assert records["quantize_linears"].result == PassResult(matched=0)
    assert not captured.gm.graph.find_nodes(op="call_function", target=QUANTIZED_LINEAR)


def test_a_merged_weight_is_its_parts_each_quantized_alone() -> None:
    _, ctx, _ = run(quantization="int8")
    prefix = "model.layers.1.self_attn"
    sources = tuple(f"{prefix}.{part}_proj.weight" for part in "qkv")
    scales = tuple(("row_scales", source, torch.int8) for source in sources)
    values = tuple(("quantize", source, scale, torch.int8) for source, scale in zip(sources, scales, strict=True))
    name = f"{prefix}.q_proj+k_proj+v_proj.weight.int8"
    assert ctx.weights[f"{name}.scale"].expression == ("cat", *scales)
    packed = ("pack_quantized_weight", ("cat", *values), ("cat", *scales))
    assert ctx.weights[f"{name}.packed"].expression == packed


def test_a_tied_embedding_is_looked_up_unquantized() -> None:
    captured, _, records = run(quantization="int8-weight-only", model={"tie_word_embeddings": True})
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS + 1)
    embedding = captured.gm.graph.find_nodes(op="call_function", target=F.embedding)[0]
    assert embedding.args[1].meta["weight"] == "model.embed_tokens.weight"
    assert embedding.args[1].meta["example_value"].dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_excluded_by_its_name_tied_or_not(tied: bool) -> None:
    model = {"tie_word_embeddings": tied}
    _, _, records = run(quantization="int8-weight-only", quantization_exclude=("lm_head",), model=model)
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS)
    _, _, records = run(quantization="fp8", quantization_exclude=(), model=model)
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS + 1)


def test_exclusions_by_glob() -> None:
    _, _, records = run(quantization="fp8", quantization_exclude=("lm_head", "*.layers.0.*", "*.down_proj"))
    assert records["quantize_linears"].result == PassResult(matched=3)
    assert records["fuse_linears"].result == PassResult(matched=4 * LAYERS + 1)


def test_a_partly_excluded_merged_weight_is_a_near_miss() -> None:
    _, _, records = run(quantization="fp8", quantization_exclude=("*.k_proj",))
    misses = result_of(records, "quantize_linears").near_misses
    assert len(misses) == LAYERS
    assert misses[0].reason == "only a part of the merged weight is to be quantized"
    assert "models/families/llama.py:" in misses[0].source
    _, _, records = run(quantization="fp8", quantization_exclude=("*.k_proj",), disabled=frozenset({"merge_linears"}))
    assert records["quantize_linears"].result == PassResult(matched=6 * LAYERS + 1)


@pytest.mark.parametrize("verify", [False, True])
def test_an_exclusion_that_matches_nothing_is_an_error(verify: bool) -> None:
    with pytest.raises(ValueError, match=r"^The quantization exclusion 'lm-head' matches no linear .* such as lm_head"):
        run(quantization="fp8", quantization_exclude=("lm-head",), verify=verify)


def test_a_computed_weight_is_a_near_miss() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight * 2)

    def change(module: torch.nn.Module) -> None:
        for layer in module.model.layers:
            layer.self_attn.o_proj.__class__ = Doubled

    captured, _, records = run(quantization="fp8", change=change)
    misses = result_of(records, "quantize_linears").near_misses
    assert [miss.reason for miss in misses] == ["its weight is computed, not a parameter"] * LAYERS
    assert len(captured.gm.graph.find_nodes(op="call_function", target=F.linear)) == LAYERS


def test_blocks_are_not_cut() -> None:
    """Queries of 64 rows are half a block: keys cannot follow them in one weight. Alone every weight will do."""
    _, _, records = run(quantization="fp8-block")
    misses = result_of(records, "quantize_linears").near_misses
    assert len(misses) == 2 * LAYERS
    assert misses[0].reason == "scales are per block of 128, and a part of the weight has 64 rows"
    _, _, records = run(quantization="fp8-block", disabled=frozenset({"merge_linears"}))
    assert records["quantize_linears"].result == PassResult(matched=7 * LAYERS)


def test_float32_norms_stay_outside() -> None:
    def float32_norms(module: torch.nn.Module) -> None:
        for layer in module.model.layers:
            layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.float()

    captured, _, records = run(quantization="int8", change=float32_norms)
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS)
    reasons = [miss.reason for miss in result_of(records, "fuse_linears").near_misses]
    assert len(reasons) == LAYERS
    assert "different dtypes (torch.float32 and torch.bfloat16)" in reasons[0]
    norms = captured.gm.graph.find_nodes(op="call_function", target=torch.rms_norm)
    assert len(norms) == LAYERS


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "fp8-weight-only", "int8-weight-only", "int4"])
def test_a_compiled_model_computes_with_the_quantized_weights(tmp_path: Path, scheme: Quantization) -> None:
    model = {"tie_word_embeddings": True, **(WIDE if scheme == "fp8-block" else {})}
    spec = tiny_spec(layers=LAYERS, **model)
    config = CompileConfig(cache_dir=tmp_path, quantization=scheme)
    ours = compile_model(spec, config, device=CPU, dtype=torch.float32, kernels=KERNELS)
    eager_spec = tiny_spec(layers=LAYERS, **model)
    eager = compile_model(eager_spec, CompileConfig(mode="eager"), device=CPU, dtype=torch.float32)
    fill(ours)
    fill(eager)
    exact = step(eager, [5, 6, 7, 8], 0, caches(spec, torch.float32))
    rounding = QuantizeLinears(scheme).round_weight
    for name, module in eager_spec.module.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = rounding(module.weight.data)
    quantized = step(eager, [5, 6, 7, 8], 0, caches(spec, torch.float32))
    logits = step(ours, [5, 6, 7, 8], 0, caches(spec, torch.float32))
    error = relative_error(logits, quantized)
    if scheme == "fp8-weight-only":
        assert error < 1e-5
    else:  # the activations are quantized, or the head is
        assert 1e-4 < error < (0.2 if scheme == "fp8-block" else 0.1)
    assert relative_error(quantized, exact) > 1e-3
    slow = ours.report.get("slow_quantized_linears")
    assert "not per block" in slow if scheme == "fp8-block" else slow is None


def test_the_artifact_is_another_one() -> None:
    configs = [
        CompileConfig(),
        CompileConfig(quantization="int8"),
        CompileConfig(quantization="fp8"),
        CompileConfig(quantization="int8", quantization_exclude=("*.o_proj",)),
    ]
    spec = tiny_spec()
    keys = [str(plan_fields(spec, default_passes(config), frozenset(), KERNELS, CPU, torch.float32)) for config in configs]
    assert len(set(keys)) == len(configs)


@pytest.mark.slow_cases
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_verification_compares_all_but_the_rounding(architecture: str, scheme: Quantization) -> None:
    _, _, records = run(architecture, quantization=scheme, model=WIDE, verify=True)
    assert check_verified(records, "quantize_linears").sites


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8-block", "int8-weight-only"])
def test_ranks_share_the_scales_of_the_whole_weight(scheme: Quantization) -> None:
    """A rank's columns and rows are quantized as those of the whole tensor, including the padding of the tied head's last rows."""
    model = WIDE | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 321,
    }
    _, ctx, records = run(quantization=scheme, model=model, verify=True, ranks=2)
    head = 1 if scheme == "int8-weight-only" else 0
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS + head)
    check_verified(records, "quantize_linears")
    down = ctx.weights[f"model.layers.0.mlp.down_proj.weight.{str(SCHEMES[scheme].dtype).removeprefix('torch.')}.scale"]
    scales = (f"{SCHEMES[scheme].scales}_scales", down.sources[0], SCHEMES[scheme].dtype)
    assert down.expression == (("shard_columns", scales, 2) if scheme == "fp8-block" else scales)


class WrongScales(QuantizeLinears):
    """Planted: the scales of the last linear are those of the one before it."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        result = super().run(gm, ctx)
        nodes = gm.graph.find_nodes(op="call_function", target=QUANTIZED_LINEAR)
        o_projs = [node for node in nodes if "o_proj" in node.args[1].name]
        o_projs[1].update_arg(2, o_projs[0].args[2])
        return result


def test_verification_finds_wrong_scales() -> None:
    passes = [WrongScales("int8") if p.name == "quantize_linears" else p for p in default_passes()]
    captured, _, records = run(passes=passes, verify=True)
    result = records["quantize_linears"].result
    assert isinstance(result, SkipReason)
    assert "failed its verification, relative error" in result.sentence
    assert not captured.gm.graph.find_nodes(op="call_function", target=QUANTIZED_LINEAR)

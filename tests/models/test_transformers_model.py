"""Unmodified classes of the transformers package are captured, rewritten, compiled and run like native models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassResult
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from tests.support.tiny_models import capture_spec
from tests.support.transformers_models import SIZES, config_of, greedy_tokens, write_random_model

LAYERS = SIZES["num_hidden_layers"]
PROMPTS = [[7, 21, 300, 9, 44], [5], list(range(30, 53))]
NUM_TOKENS = 24

PASSES = default_passes()


def build(architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ModelSpec:
    return build_model(config_of(architecture, **changes), dtype=dtype, model_impl="transformers")


def rewrite(
    spec: ModelSpec, dtype: torch.dtype, verify: bool
) -> tuple[CapturedGraph, PassContext, dict[str, PassRecord]]:
    captured = capture_spec(spec, dtype)
    ctx = PassContext(
        device=torch.device("cpu"), dtype=dtype, weights=captured.weights, fake_mode=captured.fake_mode,
        kernels=frozenset({"rope_attention", "fused_linear", "silu_mul", "add_rms_norm"}),
    )  # fmt: skip
    records = run_passes(captured.gm, PASSES, ctx, verifier=PassVerifier(spec.buffers) if verify else None)
    return captured, ctx, {record.name: record for record in records}


@pytest.mark.parametrize(
    ("architecture", "norms"), [("LlamaForCausalLM", 2), ("Qwen2ForCausalLM", 2), ("Qwen3ForCausalLM", 4)]
)
def test_every_site_is_matched(architecture: str, norms: int) -> None:
    captured, ctx, records = rewrite(build(architecture), torch.bfloat16, verify=True)
    expected = {
        "lift_norms": norms * LAYERS + 1,
        "merge_linears": 5 * LAYERS,
        "select_rows_early": 1,
        "fuse_rope_attention": LAYERS,
        "fuse_linears": 4 * LAYERS + 1,
    }
    for name, sites in expected.items():
        assert records[name].result == PassResult(matched=sites), name
    batched = records["drop_batch_axis"].result
    assert isinstance(batched, PassResult)
    assert batched.near_misses == ()
    assert all(record.verification.passed for record in records.values() if record.verification)
    ours = build_model(config_of("LlamaForCausalLM"), dtype=torch.bfloat16)
    if architecture == "LlamaForCausalLM":  # the result has the same ops as the native model
        theirs = rewrite(ours, torch.bfloat16, verify=False)[0]
        assert layer_ops(captured) == layer_ops(theirs)

    before = str(captured.gm.graph)
    for record in run_passes(captured.gm, PASSES, ctx):
        assert isinstance(record.result, PassResult)
        assert record.result.matched == 0, record.name
    assert str(captured.gm.graph) == before


def layer_ops(captured: CapturedGraph) -> list[str]:
    """The called ops in order, from our first op on. Before it, each implementation computes the angles in its own manner."""
    names = [str(node.target) for node in captured.gm.graph.nodes if node.op == "call_function"]
    return names[next(i for i, name in enumerate(names) if name.startswith("cas.")) :]


@pytest.mark.parametrize(
    "architecture", ["GemmaForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM", "Phi3ForCausalLM"]
)
def test_passes_are_correct_for_other_families(architecture: str) -> None:
    spec = build(architecture, torch.float32)
    _, _, records = rewrite(spec, torch.float32, verify=True)
    for record in records.values():
        assert isinstance(record.result, PassResult), record.sentence()
    assert records["lift_norms"].result == PassResult(
        matched=LAYERS * (4 if architecture.startswith("Olmo2") else 2) + 1
    )


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM", "Olmo2ForCausalLM"],
)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_random_model(tmp_path / "model", architecture)
    expected = greedy_tokens(folder, PROMPTS, NUM_TOKENS)
    with caplog.at_level(logging.INFO, logger="compile_and_serve.models"):
        llm = LLM(
            str(folder), dtype="float32", model_impl="transformers", max_num_seqs=4, num_kv_blocks=64, device="cpu",
            skip_tokenizer_init=True, cache_dir=tmp_path / "cache",
        )  # fmt: skip
    assert f"{architecture} runs in the transformers package's implementation." in caplog.messages
    with llm:
        assert llm.info.compile_report["distinct_pieces"] == 3
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_eager_is_the_plain_class(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", "GraniteForCausalLM", residual_multiplier=0.7, logits_scaling=3.0)
    expected = greedy_tokens(folder, PROMPTS, NUM_TOKENS)
    with LLM(
        str(folder), dtype="float32", enforce_eager=True, max_num_seqs=4, num_kv_blocks=64, skip_tokenizer_init=True
    ) as llm:  # there is no native implementation, so `auto` uses transformers' class
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("NoSuchForCausalLM", {}, "has no such model"),
        ("BertModel", {}, "does not allow its attention to be replaced"),
        ("Gemma2ForCausalLM", {}, "layer 0 caps its attention scores"),
        ("MistralForCausalLM", {"sliding_window": 64}, "layer 0 attends to a sliding window of 64 tokens"),
        ("MixtralForCausalLM", {}, "it is a mixture of experts"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("LlamaForCausalLM", {"hidden_size": 63}, "transformers cannot build LlamaForCausalLM from this config"),
    ],
)  # fmt: skip
def test_unsupported_model_is_one_sentence(architecture: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        build(architecture, **changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_window_longer_than_the_model_is_ignored() -> None:
    spec = build("MistralForCausalLM", sliding_window=SIZES["max_position_embeddings"])
    assert len(spec.state[0].layers) == LAYERS


def test_spec_describes_checkpoint_and_sharding() -> None:
    spec = build("Qwen3ForCausalLM", tie_word_embeddings=True)
    assert spec.weight_map["lm_head.weight"] is None
    assert "model.layers.0.self_attn.q_proj.weight" in dict(spec.module.named_parameters())
    assert spec.tp_plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert set(spec.tp_plan.values()) == {"colwise", "rowwise", "vocab"}
    assert spec.tp_plan["model.embed_tokens"] == spec.tp_plan["lm_head"] == "vocab"
    assert build("Olmo2ForCausalLM").tp_plan == {}  # its norms span all heads, so colwise and rowwise do not suffice
    assert spec.buffers["model.rotary_emb.inv_freq"].device.type == "cpu"
    assert spec.config["model_impl"].startswith("transformers ")

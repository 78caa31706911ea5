"""Unmodified classes of the transformers package are captured, rewritten, compiled and run like native models."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from transformers.masking_utils import blockwise_overlay, causal_mask_function, chunked_causal_mask_function, or_masks

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.capture.capture import CapturedGraph, CaptureError
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.pieces.plan import make_plan
from compile_and_serve.compiler.pieces.splitter import split
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassResult
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.transformers.attention import Mask, Unsupported, recognize
from tests.support.moe_models import FAMILIES
from tests.support.tiny_models import capture_decoder, capture_spec
from tests.support.transformers_models import SIZES, config_of, greedy_tokens, load_reference, write_random_model

LAYERS = 2
PROMPTS = [[7, 21, 300, 9, 44], [5], list(range(30, 53))]
NUM_TOKENS = 24
LLAMA4 = {"use_qk_norm": False, "no_rope_layers": [1] * LAYERS}

PASSES = default_passes()


def build(architecture: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ModelSpec:
    return build_model(config_of(architecture, **{"num_hidden_layers": LAYERS} | changes), dtype=dtype, model_impl="transformers")


def rewrite(spec: ModelSpec, dtype: torch.dtype, verify: bool) -> tuple[CapturedGraph, PassContext, dict[str, PassRecord]]:
    captured = capture_spec(spec, dtype)
    ctx = PassContext(
        device=torch.device("cpu"),
        dtype=dtype,
        weights=captured.weights,
        fake_mode=captured.fake_mode,
        kernels=frozenset({"rope_attention", "fused_linear", "silu_mul", "add_rms_norm"}),
    )
    records = run_passes(captured.gm, PASSES, ctx, verifier=PassVerifier(spec.buffers) if verify else None)
    return captured, ctx, {record.name: record for record in records}


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize(("architecture", "norms"), [("LlamaForCausalLM", 2), ("Qwen2ForCausalLM", 2), ("Qwen3ForCausalLM", 4)])
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

    before = str(captured.gm.graph)
    for record in run_passes(captured.gm, PASSES, ctx):
        assert isinstance(record.result, PassResult)
        assert record.result.matched == 0, record.name
    assert str(captured.gm.graph) == before


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["Llama"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        pytest.param("MistralForCausalLM", {"sliding_window": 64}, marks=pytest.mark.slow),
    ],
)
def test_pieces_are_those_of_the_native_model(architecture: str, changes: dict[str, Any]) -> None:
    """Layers and head are the same pieces. The first piece computes the angles in another order of views."""
    first, *rest = pieces(build(architecture, **changes))
    native_first, *native_rest = pieces(build_model(config_of(architecture, num_hidden_layers=LAYERS, **changes), dtype=torch.bfloat16))
    assert [fingerprint for fingerprint, _ in rest] == [fingerprint for fingerprint, _ in native_rest]
    assert computations(first[1]) == computations(native_first[1])


def pieces(spec: ModelSpec) -> list[tuple[str, GraphModule]]:
    """Fingerprint and graph of each distinct piece, in order."""
    captured = rewrite(spec, torch.bfloat16, verify=False)[0]
    plan, graphs = make_plan(captured.gm, split(captured.gm), captured.weights, ["logits"])
    return [(fingerprint, graphs[fingerprint]) for fingerprint in plan.pieces]


def computations(gm: GraphModule) -> Counter[str]:
    """How often the ops are called that are neither views nor products with 1.0, which fuse with their neighbours."""
    views = (torch.unsqueeze, torch.squeeze, torch.transpose, operator.getitem)
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target not in views]
    return Counter(str(node.target) for node in calls if node.args[1:] != (1.0,))


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize(
    ("architecture", "changes", "norms"),
    [
        ("GemmaForCausalLM", {}, 2),
        ("Olmo2ForCausalLM", {}, 4),  # its queries and keys are normalized before they are split into heads
        ("GraniteForCausalLM", {}, 2),
        ("Phi3ForCausalLM", {}, 2),  # one linear, cut by slices
        ("PhiForCausalLM", {"partial_rotary_factor": 0.5}, None),  # partial; attention and MLP read the same input
        ("CohereForCausalLM", {}, None),  # neighbours are rotated; attention and MLP read the same input
        pytest.param("GlmForCausalLM", {"partial_rotary_factor": 0.5, "pad_token_id": 1}, 2, marks=pytest.mark.slow),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5, "pad_token_id": 1}, 4),  # partial, of neighbours
        ("OlmoForCausalLM", {}, None),  # norms without weights
        pytest.param("HeliumForCausalLM", {}, 2, marks=pytest.mark.slow),
        pytest.param("StableLmForCausalLM", {"partial_rotary_factor": 0.25}, None, marks=pytest.mark.slow),
        pytest.param("Ernie4_5ForCausalLM", {}, 2, marks=pytest.mark.slow),
        ("GPTNeoXForCausalLM", {}, None),  # partial; one linear makes each head's query, key and value
        ("GPTJForCausalLM", {"rotary_dim": 8}, None),  # partial, of neighbours; positions pick rows of a table of angles
        (  # a gate comes from the same merged linear
            "AfmoeForCausalLM",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_dense_layers": 1,
                "sliding_window": 64,
                "layer_types": ["sliding_attention"] * LAYERS,
            },
            None,
        ),
    ],
)
def test_passes_are_correct_for_other_families(architecture: str, changes: dict[str, Any], norms: int | None) -> None:
    spec = build(architecture, torch.float32, **changes)
    _, _, records = rewrite(spec, torch.float32, verify=True)
    for record in records.values():
        assert isinstance(record.result, PassResult), record.sentence()
    rope = records["fuse_rope_attention"]
    assert rope.result == PassResult(matched=LAYERS)
    assert rope.verification is not None
    assert rope.verification.passed
    if norms is not None:
        assert records["lift_norms"].result == PassResult(matched=LAYERS * norms + 1)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Olmo2ForCausalLM", {}),
        pytest.param("CohereForCausalLM", {}, marks=pytest.mark.slow),
        pytest.param("Ernie4_5ForCausalLM", {}, marks=pytest.mark.slow),
        pytest.param("Llama4ForCausalLM", FAMILIES["Llama4ForCausalLM"] | LLAMA4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_cases(but=["Llama4"])
def test_rotation_in_float32(architecture: str, changes: dict[str, Any]) -> None:
    """These rotate bfloat16 queries and keys in float32, each with casts in other places."""
    rope = rewrite(build(architecture, **changes), torch.bfloat16, verify=True)[2]["fuse_rope_attention"]
    assert rope.result == PassResult(matched=LAYERS)
    assert rope.verification is not None
    assert rope.verification.passed


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["XGLM"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        # compute `torch.Size`s, which pieces cannot exchange
        ("GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2}),
        ("OPTForCausalLM", {}),
        ("CTRLLMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "dff": 96}),  # computes with NumPy
        ("XGLMForCausalLM", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),  # asks for the length
    ],
)
def test_values_that_are_no_tensors(architecture: str, changes: dict[str, Any]) -> None:
    captured, _, records = rewrite(build(architecture, torch.float32, **changes), torch.float32, verify=True)
    for record in records.values():
        assert isinstance(record.result, PassResult), record.sentence()
    plan, _ = make_plan(captured.gm, split(captured.gm), captured.weights, ["logits"])
    assert len(plan.pieces) <= 3


class _ReadsTokens(torch.nn.Module):
    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: Any) -> torch.Tensor:
        return input_ids if input_ids.sum() > 3 else positions


def test_a_capture_that_fails_is_one_sentence_with_the_line() -> None:
    with pytest.raises(CaptureError) as error:
        capture_decoder(_ReadsTokens(), torch.float32)
    assert f"{Path(__file__).name}:" in str(error.value)
    assert "--enforce-eager" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        # the quick tests of the passes cover these
        *(pytest.param(f"{name}ForCausalLM", marks=pytest.mark.exhaustive) for name in ("Olmo2", "Qwen2", "Qwen3", "Gemma")),
    ],
)
@pytest.mark.slow
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_random_model(tmp_path / "model", architecture)
    expected = greedy_tokens(folder, PROMPTS, NUM_TOKENS)
    with caplog.at_level(logging.INFO, logger="compile_and_serve.models"):
        llm = LLM(
            str(folder),
            dtype="float32",
            model_impl="transformers",
            max_num_seqs=4,
            num_kv_blocks=64,
            device="cpu",
            skip_tokenizer_init=True,
            cache_dir=tmp_path / "cache",
        )
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


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Gemma3ForCausalLM", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
        ("ApertusForCausalLM", {}),  # buffers of the checkpoint
        ("RobertaForCausalLM", {"is_decoder": True}),  # positions begin after the padding; buffers of integers
        ("BartForCausalLM", {"d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}),
        ("DiffLlamaForCausalLM", {}),  # a layer attends twice
        ("BloomForCausalLM", {}),
        ("GPTJForCausalLM", {"rotary_dim": 8}),
        ("GPTNeoXForCausalLM", {}),  # a renamed output head
        ("FalconForCausalLM", {"without": ("head_dim",)}),
        ("MptForCausalLM", {"n_heads": 6, "d_model": 96, "n_layers": 3, "max_seq_len": 256}),
        ("XmodForCausalLM", {"is_decoder": True, "default_language": "en_XX", "languages": ["de_DE", "en_XX"]}),
    ],
)
def test_eager_tokens_equal_transformers(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", architecture, **changes)
    with LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_kv_blocks=64,
        model_impl="transformers",
        skip_tokenizer_init=True,
        device="cpu",
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    model = load_reference(folder, torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("NoSuchForCausalLM", {}, "has no such model"),
        ("BertModel", {}, "it does not generate text"),
        ("BertLMHeadModel", {}, "its attention mask is 'bidirectional_mask_function', not causal"),
        ("CpmAntForCausalLM", {"dim_head": 16}, "its attention does not go through the attention interface"),
        ("GptOssForCausalLM", {}, "the experts model.layers.0.mlp.experts have biases, no gate, or another layout"),
        ("DeepseekV3ForCausalLM", {"n_routed_experts": 1, "qk_rope_head_dim": 8}, "it keeps latent keys and values"),
        ("RwkvForCausalLM", {}, "it has recurrent state"),
        ("LlamaForCausalLM", {"hidden_size": 63}, "transformers cannot build LlamaForCausalLM from this config"),
    ],
)
def test_unsupported_model_is_one_sentence(architecture: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        build(architecture, **changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "groups"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, [("window_caches", 64, False, ())]),
        (
            "Gemma2ForCausalLM",
            {"sliding_window": 64},
            [("window_caches", 64, False, ("soft_cap",)), ("kv_caches", None, False, ("soft_cap",))],
        ),
        (
            "GPTNeoForCausalLM",
            {"attention_types": [[["global", "local"], 1]], "window_size": 32},
            [("kv_caches", None, False, ()), ("window_caches", 32, False, ())],
        ),
        ("BloomForCausalLM", {}, [("kv_caches", None, False, ("alibi",))]),
        ("GraniteSWAForCausalLM", {"sliding_window": 64}, None),
    ],
)
def test_masks_and_scores_are_recognized(architecture: str, changes: dict[str, Any], groups: Any) -> None:
    spec = build(architecture, **changes)
    found = [(group.name, group.kind.window, "chunks" in group.features, tuple(group.scores)) for group in spec.state]
    if groups is None:
        assert {feature for group in spec.state for feature in group.features} == {"window", "sinks"}
    else:
        assert found == groups


def test_unknown_mask_is_refused() -> None:
    def first_token_too(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key == 0

    with pytest.raises(Unsupported, match="or_masks"):
        recognize(or_masks(causal_mask_function, first_token_too))
    assert recognize(chunked_causal_mask_function(64, torch.zeros(1))) == Mask(window=64, chunked=True)


def test_blocks_of_images_are_refused_unless_there_are_none() -> None:
    blocks = torch.full((1, 4), -1)
    mask = or_masks(causal_mask_function, blockwise_overlay(blocks))
    assert recognize(mask, [torch.zeros(4), blocks]) == Mask()
    with pytest.raises(Unsupported, match="or_masks"):
        recognize(mask)
    blocks[0] = 3
    with pytest.raises(Unsupported, match="or_masks"):
        recognize(mask, [blocks])


def test_rope_types_that_change_with_the_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert build("LlamaForCausalLM", rope_parameters=rope).max_model_len == 2 * SIZES["max_position_embeddings"]
    factors = [1.0 + i / 8 for i in range(8)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    spec = build("Phi3ForCausalLM", rope_parameters=rope, original_max_position_embeddings=128)
    assert spec.max_model_len == SIZES["max_position_embeddings"]
    assert spec.length_regimes is not None
    assert spec.length_regimes.limit == 128
    assert spec.buffers["model.rotary_emb.inv_freq"][0] == 1.0


def test_names_of_checkpoints() -> None:
    gpt_neox = build("GPTNeoXForCausalLM").weight_map
    assert gpt_neox["embed_out.weight"] == "lm_head.weight"
    gpt2 = build("GPT2LMHeadModel", n_layer=1, n_head=4, n_embd=64).weight_map
    assert gpt2["h.0.attn.c_attn.weight"] == "transformer.h.0.attn.c_attn.weight"
    camembert = build("CamembertForCausalLM", is_decoder=True).weight_map
    assert camembert["roberta.embeddings.word_embeddings.weight"] == "lm_head.decoder.weight"


def test_infinity_in_a_config() -> None:
    infinite = {"__float__": "Infinity"}
    assert build("GraniteForCausalLM", attention_multiplier=infinite).state == build("GraniteForCausalLM").state


def test_positions_of_roberta_begin_after_the_padding() -> None:
    spec = build("RobertaForCausalLM", is_decoder=True)
    assert spec.max_model_len == SIZES["max_position_embeddings"] - 2
    assert spec.buffers["roberta.embeddings.position_ids"].dtype == torch.int64


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

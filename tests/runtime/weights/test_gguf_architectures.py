"""A tiny file of each GGUF architecture computes what transformers' model computes that it was made from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from compile_and_serve.runtime.weights import WeightError, read_config, resolve_model
from compile_and_serve.runtime.weights.gguf_architectures import ARCHITECTURES
from tests.support import gguf_models
from tests.support.gguf_models import Case, write_model
from tests.support.loaded_checkpoints import load
from tests.support.tiny_models import plain_logits
from tests.support.transformers_models import SIZES

MXFP4 = gguf.GGMLQuantizationType.MXFP4
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "rope_parameters": ROPE, "head_dim": 32}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
NO_HEAD_SIZE = ("head_dim",)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 1.5,
}
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.5,
    **EXPERT_KEYS,
}

CASES = {
    "llama": Case(architecture="llama", model="LlamaForCausalLM", keys={"rope.dimension_count": 16}, arrange=gguf_models.interleaved),
    "llama with biases": Case(
        architecture="llama", model="LlamaForCausalLM", changes={"attention_bias": True, "mlp_bias": True}, arrange=gguf_models.interleaved
    ),
    "llama with yarn": Case(
        architecture="llama", model="LlamaForCausalLM", changes={"rope_parameters": YARN}, keys=YARN_KEYS, arrange=gguf_models.interleaved
    ),
    "llama with linear scaling": Case(
        architecture="llama",
        model="LlamaForCausalLM",
        changes={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        keys={"rope.scaling.factor": 4.0},  # without a type, as old files
        arrange=gguf_models.interleaved,
    ),
    "mixtral": Case(
        architecture="llama",
        model="MixtralForCausalLM",
        changes={**EXPERTS, "sliding_window": None, "rope_parameters": ROPE},
        keys={"expert_count": 4, "expert_used_count": 2},
        arrange=gguf_models.interleaved,
    ),
    "mistral3": Case(
        architecture="mistral3",
        model="Ministral3ForCausalLM",
        changes={"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        keys={**YARN_KEYS, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
        arrange=gguf_models.interleaved,
    ),
    "qwen2": Case(architecture="qwen2", model="Qwen2ForCausalLM"),
    "qwen2moe": Case(
        architecture="qwen2moe",
        model="Qwen2MoeForCausalLM",
        changes={**EXPERTS, "shared_expert_intermediate_size": 48},
        keys={**EXPERT_KEYS, "expert_shared_feed_forward_length": 48},
        arrange=gguf_models.one_dimension_less,
    ),
    "qwen3": Case(architecture="qwen3", model="Qwen3ForCausalLM", changes={"head_dim": 32}),
    "qwen3moe": Case(
        architecture="qwen3moe", model="Qwen3MoeForCausalLM", changes={**EXPERTS, "norm_topk_prob": True, "head_dim": 32}, keys=EXPERT_KEYS
    ),
    "gemma": Case(architecture="gemma", model="GemmaForCausalLM", changes=GEMMA, arrange=gguf_models.with_one_added),
    "gemma2": Case(
        architecture="gemma2",
        model="Gemma2ForCausalLM",
        changes={
            **GEMMA,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 16,
            "num_hidden_layers": 4,
        },
        keys={"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 16},
        arrange=gguf_models.with_one_added,
    ),
    "gemma3": Case(
        architecture="gemma3",
        model="Gemma3ForCausalLM",
        changes={
            **{name: value for name, value in GEMMA.items() if name != "rope_parameters"},
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        keys={
            "attention.sliding_window": 16,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 5000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        arrange=gguf_models.with_one_added,
    ),
    "phi2": Case(
        architecture="phi2",
        model="PhiForCausalLM",
        changes={"num_key_value_heads": 4, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        without=NO_HEAD_SIZE,
        keys={**LAYER_NORM, "rope.dimension_count": 8, "attention.head_count_kv": 4},
    ),
    "phi3": Case(
        architecture="phi3",
        model="Phi3ForCausalLM",
        changes={"sliding_window": 16},
        without=NO_HEAD_SIZE,
        keys={"attention.sliding_window": 16, "rope.dimension_count": 16},
    ),
    "starcoder2": Case(architecture="starcoder2", model="Starcoder2ForCausalLM", without=NO_HEAD_SIZE, keys=LAYER_NORM),
    "granite": Case(
        architecture="granite",
        model="GraniteForCausalLM",
        changes={"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        without=NO_HEAD_SIZE,
        keys={"embedding_scale": 3.0, "attention.scale": 0.4, "residual_scale": 0.5, "logit_scale": 2.0},
        arrange=gguf_models.interleaved,
    ),
    "olmo2": Case(architecture="olmo2", model="Olmo2ForCausalLM", without=NO_HEAD_SIZE),
    "glm4": Case(
        architecture="glm4",
        model="Glm4ForCausalLM",
        changes={"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "head_dim": 32},
        keys={"rope.dimension_count": 16},
    ),
    "smollm3": Case(
        architecture="smollm3",
        model="SmolLM3ForCausalLM",
        changes={"rope_parameters": ROPE, "num_hidden_layers": 5, "pad_token_id": 1},
        without=NO_HEAD_SIZE,
        keys={"rope.dimension_count": 16},
        arrange=gguf_models.interleaved,
    ),
    "command-r": Case(
        architecture="command-r",
        model="CohereForCausalLM",
        changes={"logit_scale": 0.25, "use_qk_norm": True, "rope_parameters": ROPE},
        without=NO_HEAD_SIZE,
        keys={**LAYER_NORM, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "falcon 7b": Case(
        architecture="falcon",
        model="FalconForCausalLM",
        without=(*NO_HEAD_SIZE, "num_key_value_heads", "intermediate_size"),
        keys={**LAYER_NORM, "attention.head_count_kv": 1},
        arrange=gguf_models.one_after_the_other,
    ),
    "falcon 40b": Case(
        architecture="falcon",
        model="FalconForCausalLM",
        changes={"new_decoder_architecture": True, "num_kv_heads": 2},
        without=(*NO_HEAD_SIZE, "num_key_value_heads", "intermediate_size"),
        keys=LAYER_NORM,
        arrange=gguf_models.one_after_the_other,
    ),
    "deepseek2, V2": Case(
        architecture="deepseek2",
        model="DeepseekV2ForCausalLM",
        changes={
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        without=NO_HEAD_SIZE,
        keys={
            **LATENT_KEYS,
            **YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
        },
        arrange=gguf_models.absorbed,
    ),
    "deepseek2, V3": Case(
        architecture="deepseek2",
        model="DeepseekV3ForCausalLM",
        changes={**LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": True},
        without=NO_HEAD_SIZE,
        keys={
            **{key: value for key, value in LATENT_KEYS.items() if not key.endswith(("_mla", "head_count_kv"))},
            "attention.key_length": 24,
            "attention.value_length": 12,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        },
    ),
}

GPT_OSS = Case(
    architecture="gpt-oss",
    model="GptOssForCausalLM",
    changes={
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "rope_parameters": {**YARN, "truncate": False},
        "head_dim": 16,
    },
    keys={**YARN_KEYS, "attention.sliding_window": 16, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96},
    arrange=gguf_models.experts_apart,
)


def make_model(case: Case) -> Any:
    import transformers

    model_class = getattr(transformers, case.model)
    torch.manual_seed(sum(case.model.encode()))
    sizes = {name: value for name, value in {**SIZES, **case.changes}.items() if name not in case.without}
    model = model_class(model_class.config_class(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.randn_like(buffer) * 0.1
    model.config._attn_implementation = "eager"  # transformers' SDPA attention ignores Gemma 2's soft cap
    return model


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def loaded(path: Path) -> Any:
    model = load(path)
    return model.spec  # type: ignore[attr-defined]


TOKENS = [(7 * i * i + 3 * i + 11) % 320 for i in range(90)]


def test_all_architectures_have_a_case() -> None:
    assert {case.architecture for case in CASES.values()} | {"gpt-oss"} == ARCHITECTURES.keys()
    assert ARCHITECTURES.keys() <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = make_model(case)
    file = write_model(tmp_path / "m.gguf", case, model)
    found = plain_logits(loaded(file), TOKENS, torch.float32)
    torch.testing.assert_close(found, logits_of(model, TOKENS), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], keys={**CASES[name].keys, "attention.new_scale": 2.0})
    file = write_model(tmp_path / "m.gguf", case, make_model(case))
    with pytest.raises(WeightError, match=rf"{case.architecture}\.attention\.new_scale to 2.0, which is not supported"):
        read_config(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 0.5),
        ("attention.scale", 0.5),
        ("embedding_scale", 2.0),
        ("residual_scale", 2.0),
        ("attention.sliding_window", 16),
        ("attn_logit_softcapping", 30.0),
        ("final_logit_softcapping", 30.0),
        ("expert_count", 8),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.causal", False),
        ("attention.value_length", 8),
        ("pooling_type", 1),
        ("rope.dimension_count", 8),
        ("rope.dimension_sections", [4, 4, 0, 0]),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("use_parallel_residual", True),
        ("attention.temperature_scale", 0.1),
    ],
)
def test_keys_that_llama_does_not_read_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    keys = YARN_KEYS if "yarn" in key else {}
    case = replace(CASES["llama"], keys={**keys, key: value})
    file = write_model(tmp_path / "m.gguf", case, make_model(CASES["llama"]))
    with pytest.raises(WeightError, match=rf"llama\.{key} to "):
        read_config(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [("logit_scale", 1.0), ("expert_count", 0), ("attention.causal", True), ("pooling_type", 3), ("rope.scaling.finetuned", True)],
)
def test_keys_that_change_nothing_are_accepted(key: str, value: Any, tmp_path: Path) -> None:
    model = make_model(CASES["llama"])
    plain = read_config(write_model(tmp_path / "plain.gguf", CASES["llama"], model))
    case = replace(CASES["llama"], keys={**CASES["llama"].keys, key: value})
    assert read_config(write_model(tmp_path / "m.gguf", case, model)) == plain


def test_yarn_keys_are_read(tmp_path: Path) -> None:
    """Its betas, and factors of cos and sin, which llama.cpp multiplies with YaRN's own."""
    rope = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5 * (0.1 * math.log(4.0) + 1.0)}
    keys = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 1.5}
    case = replace(CASES["llama with yarn"], changes={"rope_parameters": rope}, keys={**YARN_KEYS, **keys})
    model = make_model(case)
    file = write_model(tmp_path / "m.gguf", case, model)
    torch.testing.assert_close(plain_logits(loaded(file), TOKENS, torch.float32), logits_of(model, TOKENS), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
def test_gpt_oss(kind: str, tmp_path: Path) -> None:
    """Experts in MXFP4 keep their codes and scales."""
    model = make_model(GPT_OSS)
    if kind == "MXFP4":
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                blocks = quantize(np.ascontiguousarray(parameter.detach().transpose(1, 2).numpy()), MXFP4)
                parameter.data = torch.from_numpy(dequantize(blocks, MXFP4)).transpose(1, 2).contiguous()
    file = write_model(tmp_path / "m.gguf", GPT_OSS, model, kind, only="_exps")
    spec = loaded(file)
    experts = spec.quantized_weights["model.layers.0.mlp.experts.down_proj"]
    assert experts.is_quantized == (kind == "MXFP4")
    torch.testing.assert_close(plain_logits(spec, TOKENS, torch.float32), logits_of(model, TOKENS), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2moe", "phi2", "falcon 40b", "deepseek2, V2", "gemma3"])
def test_blocks_compute_what_dequantized_weights_do(name: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", CASES[name], make_model(CASES[name]), "Q8_0")
    blocks, plain = load(file), load(file, requantize=True)
    assert blocks.spec.quantized_weights  # type: ignore[attr-defined]
    assert not plain.spec.quantized_weights  # type: ignore[attr-defined]
    found, expected = (plain_logits(one.spec, TOKENS, torch.float32) for one in (blocks, plain))  # type: ignore[attr-defined]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_fused_queries_keys_and_values_are_split(tmp_path: Path) -> None:
    """Old files of phi2 have them in one tensor."""
    case = CASES["phi2"]
    model = make_model(case)
    file = write_model(tmp_path / "m.gguf", replace(case, arrange=fused), model)
    torch.testing.assert_close(plain_logits(loaded(file), TOKENS, torch.float32), logits_of(model, TOKENS), rtol=2e-4, atol=2e-4)


def fused(tensors: gguf_models.Tensors, config: Any) -> gguf_models.Tensors:
    found = {name: tensor for name, tensor in tensors.items() if not any(f".{one}_proj." in name for one in "qkv")}
    for name in tensors:
        if ".q_proj." in name:
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([tensors[name.replace(".q_", f".{one}_")] for one in "qkv"])
    return found


def test_longrope_has_its_short_factors_within_the_original_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }
    case = replace(
        CASES["phi3"],
        changes={"rope_parameters": rope, "original_max_position_embeddings": 64},
        keys={"rope.dimension_count": 16, "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25},
    )
    model = make_model(case)
    spec = loaded(write_model(tmp_path / "m.gguf", case, model))
    assert spec.max_model_len == 256  # `context_length` of the file
    torch.testing.assert_close(plain_logits(spec, TOKENS[:60], torch.float32), logits_of(model, TOKENS[:60]), rtol=2e-4, atol=2e-4)


class TestSplitFiles:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        case = CASES["llama"]
        first = write_model(tmp_path / "tiny.gguf", case, make_model(case), parts=3)
        return sorted(first.parent.glob("tiny-*.gguf"))

    @pytest.mark.parametrize("given", [0, 1, 2])
    def test_any_part_stands_for_all(self, parts: list[Path], given: int) -> None:
        found = plain_logits(loaded(parts[given]), TOKENS, torch.float32)
        torch.testing.assert_close(found, logits_of(make_model(CASES["llama"]), TOKENS), rtol=2e-4, atol=2e-4)

    def test_a_folder_of_parts_is_a_model(self, parts: list[Path]) -> None:
        assert resolve_model(str(parts[0].parent)) == parts[0]

    @pytest.mark.parametrize(("given", "removed"), [(0, 1), (0, 2), (1, 0)])
    def test_a_part_that_is_absent_is_named(self, parts: list[Path], given: int, removed: int) -> None:
        parts[removed].unlink()
        with pytest.raises(WeightError, match=rf"{parts[removed].name} is not beside it"):
            read_config(parts[given])

    def test_a_renamed_part_is_one_sentence(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("model.gguf"))
        with pytest.raises(WeightError, match="one of 3 parts of a split model, but it was renamed"):
            read_config(renamed)

    def test_parts_of_different_models_are_one_sentence(self, parts: list[Path], tmp_path: Path) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(WeightError, match="do not belong together"):
            read_config(parts[0])

"""The registry: the contents of a spec, and one sentence for an invalid config."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from compile_and_serve.custom_ops.stored_weight import ArrangedWeight
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.families import FAMILIES as ALL_FAMILIES
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.transformers.model import TransformersModel
from tests.support.recurrent_models import FAMILIES as RECURRENT_FAMILIES
from tests.support.vision_models import QWEN

OTHERS = {
    *RECURRENT_FAMILIES,
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "OpenVLAForActionPrediction",
    *(f"{prefix}ForConditionalGeneration" for prefix in ("Whisper", "Bart", "T5", "MT5", "Mllama")),
    *(f"{prefix}ForConditionalGeneration" for prefix, *_ in QWEN.values()),
}
# Those that come with the package, whose sizes and checkpoints' names are alike.
FAMILIES = [name for name, one in ALL_FAMILIES.items() if name not in OTHERS and one.build.__module__.startswith("compile_and_serve.")]
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "DeepseekV2ForCausalLM": {**LATENT, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
    },
}


def config_of(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **EXPERTS.get(architecture, {}), **overrides}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_module_is_on_meta_in_the_given_dtype(architecture: str) -> None:
    spec = build_model(config_of(architecture), dtype=torch.bfloat16)
    parameters = {n: p for n, p in spec.module.named_parameters() if not n.endswith("e_score_correction_bias")}
    assert {(p.device.type, p.dtype) for p in parameters.values()} == {("meta", torch.bfloat16)}
    layers = [layer for group in spec.state for layer in group.layers]
    assert [layer.num_kv_heads for layer in layers] == [1 if architecture.startswith("Deepseek") else 2] * 3
    module_buffers = {name: (b.shape, b.dtype) for name, b in spec.module.named_buffers()}
    assert module_buffers == {name: (b.shape, b.dtype) for name, b in spec.buffers.items()}
    assert all(b.device.type == "cpu" for b in spec.buffers.values())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_parameter_names_equal_those_of_transformers(architecture: str) -> None:
    import transformers

    config = config_of(architecture, attention_bias=architecture not in EXPERTS)
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        theirs = model_class(model_class.config_class(**config))
    spec = build_model(config, dtype=torch.float32)
    biases = {n: b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")}
    expected = dict(theirs.named_parameters()) | biases
    ours = {n: tuple(p.shape) for n, p in spec.module.named_parameters()}
    arranged = (stored for stored in spec.quantized_weights.values() if isinstance(stored, ArrangedWeight))
    ours |= {tensor.name: tensor.shape for stored in arranged for tensor in stored.tensors}  # as checkpoints hold them
    assert ours == {n: tuple(p.shape) for n, p in expected.items()}


def test_tied_embeddings_are_one_parameter() -> None:
    spec = build_model(config_of(tie_word_embeddings=True), dtype=torch.float32)
    names = dict(spec.module.named_parameters())
    assert "lm_head.weight" not in names
    assert spec.module.lm_head.weight is names["model.embed_tokens.weight"]
    assert spec.weight_map["lm_head.weight"] is None


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tp_plan_covers_every_linear_of_the_layers(architecture: str) -> None:
    spec = build_model(config_of(architecture), dtype=torch.float32)
    linears = [n for n, m in spec.module.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    counts = {"Qwen2MoeForCausalLM": 27, "DeepseekV2ForCausalLM": 3 * 7, "DeepseekV3ForCausalLM": 3 * 8, "Glm4MoeForCausalLM": 3 * 7}
    assert len(linears) == counts.get(architecture, 15 if architecture in EXPERTS else 21)
    for name in linears:
        styles = [style for pattern, style in spec.tp_plan.items() if fnmatch(name, pattern)]
        whole = "replicated" if name.endswith(("gate", "expert_gate", "router", "q_a_proj", "kv_a_proj_with_mqa")) else "colwise"
        assert styles == ["rowwise" if name.endswith(("o_proj", "down_proj")) else whole]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SIZES}, 'names no architecture: expected "architectures" to be one of BambaForCausalLM, BartForConditionalGeneration, '),
        (
            config_of("RwkvForCausalLM"),
            "RwkvForCausalLM cannot run in the transformers package's implementation: it has recurrent state (`compile-and-"
            "serve models` lists",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "lacks vocab_size, hidden_size, intermediate_size, num_hidden_layers"),
        (config_of(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
        (config_of(hidden_size="big"), "hidden_size in the model's config must be a positive integer, got 'big'"),
        (config_of(hidden_size=62), "hidden_size must be a multiple of num_attention_heads"),
        (config_of(rope_scaling={"rope_type": "linear"}), "RoPE type 'linear' needs 'factor'"),
        (config_of(rope_scaling={"rope_type": "divisors"}), "RoPE type 'divisors' needs 'divisors'"),
        (config_of(rope_scaling={"rope_type": "linear", "rope_theta": None}), "RoPE type 'linear' needs 'rope_theta'"),
        (
            config_of(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling={"type": "linear", "factor": 2.0}),
            "rope_parameters and rope_scaling in the model's config disagree about rope_type ('default' and 'linear')",
        ),
        (
            config_of(rope_parameters={"rope_type": "linear", "factor": 4.0}, rope_scaling={"type": "linear", "factor": 2.0}),
            "disagree about factor (4.0 and 2.0): move everything, including rope_theta, to rope_parameters",
        ),
    ],
)
def test_bad_config_is_one_sentence(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        build_model(config, dtype=torch.float32)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
        (config_of("Qwen3ForCausalLM", use_sliding_window=True), "use_sliding_window is not supported"),
        (config_of(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), "'dynamic' is not supported: expected one of default"),
        (config_of(partial_rotary_factor=0.5), "partial_rotary_factor is not supported"),
    ],
)
def test_a_right_config_that_the_native_model_does_not_do_runs_in_transformers_class(
    config: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="compile_and_serve.models"):
        spec = build_model(config, dtype=torch.float32)
    assert reason in caplog.text
    assert isinstance(spec.module, TransformersModel)

"""Mixtures of experts, native and of transformers: logits equal transformers', and the checks of configs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.weights import WeightError, load_weights
from tests.models.test_registry import config_of
from tests.support.moe_models import FAMILIES, YARN, write_moe
from tests.support.quantized_checkpoints import write_quantized
from tests.support.tiny_models import plain_logits


def loaded(folder: Path) -> ModelSpec:
    """The plain module with the checkpoint's weights, through the loader."""
    from compile_and_serve.compiler.model import EagerModel

    spec = build_model(json.loads((folder / "config.json").read_text()), dtype=torch.float32)
    cpu = torch.device("cpu")
    model = EagerModel(spec=spec, device=cpu, report={})
    load_weights(model, spec, folder, load_format="auto", device=cpu, dtype=torch.float32, seed=0)
    return spec


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 90])
def test_logits_equal_transformers(architecture: str, num_tokens: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_moe(tmp_path, architecture)
    tokens = torch.randint(3, 320, (num_tokens,)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(plain_logits(loaded(folder), tokens, torch.float32), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 32, "attention_bias": True},
        ),
        (
            "DeepseekV3ForCausalLM",
            {"rope_interleave": False, "q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ),
        ("Glm4MoeForCausalLM", {"use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1}),
        (
            "Glm4MoeForCausalLM",
            {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}, "norm_topk_prob": False, "first_k_dense_replace": 0},
        ),
    ],
)
def test_variants_of_the_layers(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_moe(tmp_path, architecture, **changes)
    tokens = torch.randint(3, 320, (40,)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(plain_logits(loaded(folder), tokens, torch.float32), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize("to_the_same", [True, False], ids=["to the same experts", "to all experts"])
def test_every_load_of_the_experts(num_tokens: int, to_the_same: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_moe(tmp_path, "Glm4MoeForCausalLM", max_position_embeddings=1024)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
            tensor[:2] = 10.0 if to_the_same else 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: set[int] = set()
    reference.model.layers[1].mlp.gate.register_forward_hook(lambda gate, given, out: chosen.update(out[2].flatten().tolist()))
    tokens = torch.randint(3, 320, (num_tokens,)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert len(chosen) == (2 if to_the_same or num_tokens == 1 else 8)
    torch.testing.assert_close(plain_logits(loaded(folder), tokens, torch.float32), expected, rtol=1e-4, atol=1e-4)


def test_float8_blocks_have_the_values_of_the_dequantized_weights(tmp_path: Path) -> None:
    plain = write_moe(tmp_path / "plain", "Qwen3MoeForCausalLM", moe_intermediate_size=128)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantized, dequantized = (loaded(folder) for folder in write_quantized(plain, tmp_path / "fp8", config))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert quantized.quantized_weights[name].tensors[1].shape == (6, 2, 1)
    values = dict(quantized.module.named_parameters())
    for name, parameter in dequantized.module.named_parameters():
        assert torch.equal(values[name], parameter), name


def test_stacked_weights_are_read_as_they_are(tmp_path: Path) -> None:
    """A checkpoint may have one tensor for all experts."""
    folder = write_moe(tmp_path, "Qwen3MoeForCausalLM")
    expected = plain_logits(loaded(folder), [5, 6, 7], torch.float32)
    spec = loaded(folder)
    save_file({n: p.contiguous() for n, p in spec.module.named_parameters()}, folder / "model.safetensors")
    assert torch.equal(plain_logits(loaded(folder), [5, 6, 7], torch.float32), expected)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_moe(tmp_path, "Qwen3MoeForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.1.mlp.experts.4.up_proj.weight"
    wrong = "model.layers.1.mlp.experts.4.down_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != missing}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=f"lacks {missing}, which"):
        loaded(folder)
    save_file(tensors | {wrong: torch.zeros(3, 4)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{wrong} .* has shape \[3, 4\]"):
        loaded(folder)


def test_float8_experts_that_the_config_does_not_declare_are_refused(tmp_path: Path) -> None:
    """Their scales would be lost."""
    folder = write_moe(tmp_path, "DeepseekV3ForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{name} .* is stored as torch.float8_e4m3fn, but"):
        loaded(folder)


def test_router_keeps_its_dtype_in_float8_checkpoints() -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = config_of("DeepseekV3ForCausalLM", quantization_config=quantization, moe_intermediate_size=128)
    spec = build_model(config, dtype=torch.bfloat16)
    assert "model.layers.1.self_attn.kv_b_proj.weight" in spec.quantized_weights
    assert not [name for name in spec.quantized_weights if ".mlp.gate." in name]


def test_routing_that_is_not_known() -> None:
    for changes, message in (
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid' with topk_method 'greedy'"),
        ({"norm_topk_prob": True}, "norm_topk_prob is not supported with scoring_func 'softmax'"),
        ({"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "from 1 of 3 groups"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            build_model(config_of("DeepseekV2ForCausalLM", **changes), dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("Qwen3MoeForCausalLM", num_experts_per_tok=9), "must be at most the number of experts, 4, got 9"),
        (config_of("Qwen3MoeForCausalLM", num_experts=0), "num_experts in the model's config must be a positive integer"),
        (
            config_of("Glm4MoeForCausalLM", partial_rotary_factor=0.2),
            "partial_rotary_factor is 0.2 and the head size 16: RoPE must rotate pairs",
        ),
        (config_of("Glm4MoeForCausalLM", n_group=3), "2 of 4 experts cannot be chosen from 1 of 3 groups"),
        (config_of("MixtralForCausalLM", sliding_window=64), "sliding_window is not supported for Mixtral"),
    ],
)
def test_bad_config_is_one_sentence(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        build_model(config, dtype=torch.float32)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

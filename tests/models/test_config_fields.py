"""Fields of a config.json that a family does not read, and values of wrong types."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from compile_and_serve.models import config_fields
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.config_fields import NO_EFFECT
from compile_and_serve.models.families import known_families
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.transformers.model import TransformersModel
from tests.models.test_registry import config_of
from tests.support.tiny_models import tiny_config, tiny_spec


def test_a_field_that_the_family_does_not_read_goes_to_transformers_class(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("Qwen2MoeForCausalLM", model_type="qwen2_moe", qkv_bias=False)
    with caplog.at_level(logging.INFO):
        assert isinstance(build_model(config, dtype=torch.float32).module, TransformersModel)
    assert "qkv_bias is False, which the native Qwen2MoeForCausalLM does not read" in caplog.text
    assert not isinstance(build_model({**config, "qkv_bias": True}, dtype=torch.float32).module, TransformersModel)


@pytest.mark.parametrize("architecture", [name for name, family in known_families().items() if family.fields is not None])
def test_every_field_of_transformers_class_is_read_or_has_no_effect_or_is_refused(architecture: str) -> None:
    """Of a field in none of the lists, another value than the default leads away from the native family."""
    import transformers

    fields = known_families()[architecture].fields
    assert fields is not None
    config_class = getattr(transformers, architecture).config_class
    unread = {one.name for one in dataclasses.fields(config_class)} - fields.keys() - NO_EFFECT - {"architectures", "is_encoder_decoder"}
    if hasattr(config_class(), "use_sliding_window"):
        unread -= {"sliding_window"}  # it says nothing unless that one is true, which is read
    for name in unread:
        default = getattr(config_class(), name)
        if default is None or isinstance(default, list):
            continue  # derived from other fields
        assert isinstance(default, bool | int | float | str), name
        changed = not default if isinstance(default, bool) else f"not-{default}" if isinstance(default, str) else default + 1
        config = config_of(architecture, **{name: changed})
        try:
            assert isinstance(build_model(config, dtype=torch.float32).module, TransformersModel), name
        except ModelConfigError:
            continue


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("LlamaForCausalLM", {"pretraining_tp": 1, "mlp_bias": False, "rope_scaling": None}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}),
        ("Qwen3ForCausalLM", {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}),
        ("Qwen3MoeForCausalLM", {"sliding_window": None, "output_router_logits": False}),
        ("GptOssForCausalLM", {"initial_context_length": 4096}),
        ("DeepseekV2ForCausalLM", {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1}),
    ],
)
def test_published_fields_need_no_look_at_transformers(architecture: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To import it takes seconds of a start."""
    monkeypatch.setattr(config_fields, "_config_class", lambda config, architecture: pytest.fail(f"looks for the class of {architecture}"))
    build_model(config_of(architecture, **more), dtype=torch.float32)


def test_a_window_that_is_used_is_not_passed_over() -> None:
    config = config_of("Qwen3MoeForCausalLM", model_type="qwen3_moe", use_sliding_window=True, sliding_window=16)
    assert isinstance(build_model(config, dtype=torch.float32).module, TransformersModel)


def test_fields_that_transformers_class_lacks_change_nothing() -> None:
    plain, more = tiny_spec(), tiny_spec(made_by="somebody", new_scale=2.0)
    assert type(plain.module) is type(more.module)


def test_fields_with_the_classs_default_change_nothing() -> None:
    spec = tiny_spec("Qwen3ForCausalLM", layer_types=["full_attention"] * 2)
    assert not isinstance(spec.module, TransformersModel)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("hidden_size", "64", "hidden_size in the model's config must be a positive integer, got '64'"),
        ("num_hidden_layers", 2.5, "num_hidden_layers in the model's config must be a positive integer, got 2.5"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps in the model's config must be a number, got '1e-5'"),
        ("attention_bias", "false", "attention_bias in the model's config must be true or false, got 'false'"),
        ("tie_word_embeddings", 0, "tie_word_embeddings in the model's config must be true or false, got 0"),
        ("rope_scaling", "linear", "rope_scaling in the model's config must be a JSON object, got 'linear'"),
        ("rope_scaling", {"type": "linear", "factor": "4"}, "factor of the RoPE parameters .* must be a number, got '4'"),
        ("hidden_act", ["silu"], "hidden_act in the model's config must be a text"),
        ("architectures", "LlamaForCausalLM", "names no architecture"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4, "dynamic": 7}, "quantization_config has a field of a wrong type"),
    ],
)
def test_values_of_a_wrong_type_are_one_sentence(field: str, value: Any, says: str) -> None:
    with pytest.raises(ModelConfigError, match=says) as error:
        build_model({**tiny_config(), field: value}, dtype=torch.float32)
    assert "\n" not in str(error.value)


def test_values_of_a_wrong_type_are_one_sentence_in_transformers_class() -> None:
    config = {**tiny_config("GraniteForCausalLM"), "hidden_size": "64", "model_type": "granite"}
    with pytest.raises(ModelConfigError, match="'hidden_size' expected int, got str") as error:
        build_model(config, dtype=torch.float32)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"R1": {}}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "sparsity_config": {"format": "sparse"}}, "sparsity_config"),
        ({"quant_method": "fp8", "modules_to_convert": ["q_proj"]}, "modules_to_convert"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 8}}, "adapter"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "pre_quant_scale": True}, "pre_quant_scale"),
        ({"quant_method": "quark", "layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config"),
    ],
)
def test_fields_of_a_quantization_that_are_not_read_are_refused(quantization: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelConfigError, match=f"quantization_config's {field} is .*, which is not supported: only its default is"):
        tiny_spec(quantization_config=quantization, hidden_size=128)


@pytest.mark.parametrize(
    ("architecture", "field", "default"),
    [
        ("MistralForCausalLM", "sliding_window", 4096),
        ("MixtralForCausalLM", "rms_norm_eps", 1e-5),
        ("MixtralForCausalLM", "rope_theta", 1e6),
        ("OlmoeForCausalLM", "rms_norm_eps", 1e-5),
        ("GptOssForCausalLM", "rms_norm_eps", 1e-5),
    ],
)
def test_absent_fields_have_the_classs_default(architecture: str, field: str, default: Any) -> None:
    absent, given = (build_model(config_of(architecture, **more), dtype=torch.float32) for more in ({}, {field: default}))
    assert absent.state == given.state
    assert [norm.eps for norm in absent.module.modules() if isinstance(norm, torch.nn.RMSNorm)] == [
        norm.eps for norm in given.module.modules() if isinstance(norm, torch.nn.RMSNorm)
    ]
    if field != "rms_norm_eps":
        return
    other = build_model(config_of(architecture, **{field: 1e-6}), dtype=torch.float32)
    assert other.module.model.norm.eps != absent.module.model.norm.eps  # type: ignore[union-attr]

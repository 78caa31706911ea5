"""`quantization_config`: which linears a checkpoint stores quantized and how; unsupported schemes are one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.stored_weight import StoredWeight, scaled_weight
from compile_and_serve.models.config import ModelConfigError
from tests.support.quantized_checkpoints import compressed_tensors_config
from tests.support.tiny_models import tiny_spec

FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
O_PROJ = "model.layers.1.self_attn.o_proj"


def stored(quantization_config: Any, **config: Any) -> dict[str, StoredWeight]:
    return dict(tiny_spec(quantization_config=quantization_config, **config).quantized_weights)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_compressed_tensors(architecture: str) -> None:
    found = stored(compressed_tensors_config("float", "channel", "token"), architecture=architecture)
    assert len(found) == 2 * 7
    assert found[f"{O_PROJ}.weight"] == scaled_weight(
        f"{O_PROJ}.weight", (64, 64), torch.float8_e4m3fn, scale=f"{O_PROJ}.weight_scale", scale_of="row", activations="dynamic"
    )
    found = stored(compressed_tensors_config("int", "tensor", "static"))
    assert found[f"{O_PROJ}.weight"] == scaled_weight(
        f"{O_PROJ}.weight",
        (64, 64),
        torch.int8,
        scale=f"{O_PROJ}.weight_scale",
        scale_of="tensor",
        activations="static",
        input_scale=f"{O_PROJ}.input_scale",
    )
    assert stored(compressed_tensors_config("int", "channel", None))[f"{O_PROJ}.weight"].parts.activations == "none"  # type: ignore[union-attr]
    found = stored(compressed_tensors_config("float", "block", "group"), hidden_size=192)
    assert found[f"{O_PROJ}.weight"].tensors[1].shape == (2, 1)
    assert found[f"{O_PROJ}.weight"].parts.per_block  # type: ignore[union-attr]


def test_compressed_tensors_ignores_and_targets() -> None:
    config = compressed_tensors_config("int", "channel", "token")
    config["ignore"] = ["lm_head", "re:.*layers\\.0\\..*", "model.layers.1.mlp.down_proj"]
    assert len(stored(config)) == 6
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    assert sorted(stored(config)) == [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    config["ignore"] = []
    config["config_groups"]["group_0"]["targets"] = ["Linear"]
    assert "lm_head.weight" in stored(config)
    assert "model.embed_tokens.weight" not in stored(config, tie_word_embeddings=True)


def test_fp8() -> None:
    found = stored(FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0", "down_proj"]})
    assert len(found) == 6
    assert found[f"{O_PROJ}.weight"] == scaled_weight(
        f"{O_PROJ}.weight", (64, 64), torch.float8_e4m3fn, scale=f"{O_PROJ}.weight_scale_inv", scale_of="block", activations="dynamic"
    )
    assert len(stored(FP8_BLOCKS)) == 14
    found = stored({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    assert [tensor.name for tensor in found[f"{O_PROJ}.weight"].tensors[1:]] == [f"{O_PROJ}.weight_scale", f"{O_PROJ}.input_scale"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "must be a JSON object, got a str"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported: use a checkpoint in the"),
        (FP8_BLOCKS | {"weight_block_size": [64, 64]}, "fp8 blocks of [64, 64] with dynamic activations, which is not"),
        (FP8_BLOCKS | {"activation_scheme": "static"}, "fp8 blocks of [128, 128] with static activations"),
        (FP8_BLOCKS | {"activation_scheme": "odd"}, "activation_scheme 'odd'"),
        (FP8_BLOCKS | {"fmt": "e5m2"}, "fp8 weights in 'e5m2', which is not supported: expected 'e4m3'"),
        (compressed_tensors_config("int", "group", "token"), "8-bit int weights per group, which is not supported"),
        (compressed_tensors_config("int", "channel", "token", bits=4), "4-bit int weights per channel"),
        (compressed_tensors_config("int", "channel", "token", symmetric=False), "8-bit int weights per channel"),
        (compressed_tensors_config("int", "block", "group", block=[64, 64]), "per block of [64, 64]"),
        (compressed_tensors_config("int", "channel", "group"), "8-bit int activations per group over 8-bit int weights"),
        (compressed_tensors_config("int", "channel", "token", file_format="marlin-24"), "format 'marlin-24'"),
    ],
)
def test_unsupported_scheme_is_one_sentence(config: Any, message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        stored(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

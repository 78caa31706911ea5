"""Checkpoints that torchao quantized: the names in their files, and what their configs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.custom_ops.stored_weight import ScaledParts
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import load_weights, read_config
from tests.support.quantized_checkpoints import compressed_tensors_config, write_quantized
from tests.support.tiny_models import tiny_config

ROW, TENSOR = ({"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}, {"_type": "PerTensor", "_version": 1, "_data": {}})
FLOAT8 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
SYMMETRIC = {"_type": "MappingType", "_data": "SYMMETRIC"}


def torchao(kind: str, **settings: Any) -> dict[str, Any]:
    scheme = {"_type": f"{kind}Config", "_version": 2, "_data": settings}
    return {"quant_method": "torchao", "quant_type": {"default": scheme}, "modules_to_not_convert": None}


# The configs as torchao 0.18's `config_to_dict` writes them, without fields that change nothing here; kind, strategy, activations.
FORMATS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "int8-weights": (torchao("Int8WeightOnly", group_size=None, granularity=ROW), "int", "channel", "none"),
    "int8": (
        torchao("Int8DynamicActivationInt8Weight", act_mapping_type=SYMMETRIC, granularity=ROW, reduce_range=False),
        "int", "channel", "dynamic",
    ),
    "float8-weights": (torchao("Float8WeightOnly", weight_dtype=FLOAT8, granularity=ROW), "float", "channel", "none"),
    "float8": (
        torchao(
            "Float8DynamicActivationFloat8Weight", activation_dtype=FLOAT8, weight_dtype=FLOAT8, granularity=[TENSOR, TENSOR],
            packing_format={"_type": "Float8PackingFormat", "_data": "PLAIN"}, activation_value_lb=None, activation_value_ub=None,
        ),
        "float", "tensor", "dynamic",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tiny_llama_dir: Path, tmp_path: Path) -> None:
    config, kind, strategy, activations = FORMATS[name]
    plain = compressed_tensors_config(kind, strategy, None)
    folder, dequantized = write_quantized(tiny_llama_dir, tmp_path, plain)
    held = load_file(folder / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for key, tensor in held.items():
        if f"{key}_scale" in held:
            renamed[f"{key.removesuffix('weight')}_weight_qdata"] = tensor
            if kind == "int":
                renamed[f"{key.removesuffix('weight')}_weight_zero_point"] = torch.zeros(len(tensor), 1, dtype=torch.int8)
        else:
            renamed[key.replace(".weight_scale", "._weight_scale")] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))

    spec = build_model(read_config(folder), dtype=torch.float32)
    stored = spec.quantized_weights["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(stored.parts, ScaledParts)
    assert stored.parts.activations == activations
    options = {"device": torch.device("cpu"), "dtype": torch.float32}
    model = compile_model(spec, CompileConfig(mode="eager"), kernels=frozenset(), **options)  # type: ignore[arg-type]
    report = load_weights(model, spec, folder, load_format="auto", seed=0, **options)  # type: ignore[arg-type]
    assert report.unexpected == ()
    parameters = dict(spec.module.named_parameters())
    for key, expected in load_file(dequantized / "model.safetensors").items():
        assert torch.equal(parameters[key], expected.float()), key


def test_what_is_not_supported_is_named() -> None:
    for config, message in (
        (torchao("Int4WeightOnly", group_size=128), r"quant_type is 'Int4WeightOnlyConfig'"),
        (torchao("Int8WeightOnly", group_size=32, granularity=ROW), r"quant_type group_size is 32"),
        (torchao("Float8WeightOnly", granularity={"_type": "PerGroup", "_data": {}}), r"granularity is 'PerGroup'"),
        (
            torchao("Int8DynamicActivationInt8Weight", act_mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"}),
            r"quant_type act_mapping_type is 'ASYMMETRIC'",
        ),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, r"quantization_config's quant_type is"),
        (torchao("Int8WeightOnly", granularity=ROW) | {"include_input_output_embeddings": True}, "include_input_output_embeddings is"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            build_model(tiny_config() | {"quantization_config": config}, dtype=torch.float32)

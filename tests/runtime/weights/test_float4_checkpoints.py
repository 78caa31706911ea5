"""NVFP4, MXFP4, bitsandbytes, ModelOpt and Quark end to end: dequantized values are exact, and logits match the dequantized model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization import config_fields
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import WeightError, read_config
from tests.support.float4_checkpoints import float4_linear
from tests.support.group_checkpoints import write_grouped
from tests.support.loaded_checkpoints import EAGER, load, logits
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
LAYERS = 2


def packed(file_format: str, group_size: int, **inputs: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs or None}
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def bnb(**settings: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": None,
    } | settings


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
QUARK = {
    "quant_method": "quark",
    "exclude": ["lm_head"],
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": None,
    },
}
FORMATS: dict[str, dict[str, Any]] = {
    "nvfp4": packed("nvfp4-pack-quantized", 16, num_bits=4, type="float"),
    "mxfp4": packed("mxfp4-pack-quantized", 32),
    "modelopt-nvfp4": MODELOPT,
    "modelopt-fp8": MODELOPT | {"quant_algo": "FP8"},
    "quark-mxfp4": QUARK,
    "nf4": bnb(),
    "nf4-double": bnb(bnb_4bit_use_double_quant=True),
    "fp4": bnb(bnb_4bit_quant_type="fp4"),
    "llm-int8": bnb(load_in_4bit=False, load_in_8bit=True),
}
COMPILED = ("nvfp4", "mxfp4", "nf4-double", "llm-int8")


def write(plain: Path, folder: Path, name: str) -> tuple[Path, Path]:
    return write_grouped(plain, folder, FORMATS[name], pack=float4_linear)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_weights_are_exact(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write(plain, tmp_path, name)
    held = dict(load(quantized).module.named_parameters())  # type: ignore[attr-defined, union-attr]
    for key, expected in load_file(dequantized / "model.safetensors").items():
        # A product of three factors may be rounded in another order.
        assert torch.allclose(held[key].float(), expected.float(), rtol=2e-7, atol=0), key


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["nvfp4", "llm-int8"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_logits(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write(plain, tmp_path, name)
    reference = logits(load(dequantized))
    model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache", verify_passes=True))
    row = next(row for row in model.report["passes"] if row["name"] == "quantize_linears")
    assert (row["matched"], row["near_misses"]) == (4 * LAYERS, [])
    assert [row for row in model.report["passes"] if row.get("verification", {}).get("reason")] == []
    assert relative_error(logits(model), reference) < 1e-3
    kept = "int8.packed" if name == "llm-int8" else "4bits.packed"
    assert any(target.endswith(kept) for target in model.weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FORMATS)
def test_dummy_weights_have_the_usual_spread(name: str, plain: Path, tmp_path: Path) -> None:
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": FORMATS[name]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = load(tmp_path, EAGER, load_format="dummy")
    weight = model.module.model.layers[0].mlp.up_proj.weight  # type: ignore[attr-defined, union-attr]
    assert 0.6 < weight.std() / settings["initializer_range"] < 1.5


def test_old_modelopt_folders_have_a_second_config(plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write(plain, tmp_path, "modelopt-nvfp4")
    settings = json.loads((quantized / "config.json").read_text())
    del settings["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(settings))
    old = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(old))
    held = dict(load(quantized).module.named_parameters())  # type: ignore[attr-defined, union-attr]
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.allclose(held[name], load_file(dequantized / "model.safetensors")[name], rtol=2e-7, atol=0)
    (quantized / "hf_quant_config.json").write_text(json.dumps({"quantization": "NVFP4"}))
    with pytest.raises(WeightError, match=r"quantization in .*hf_quant_config.json must be a JSON object, got a str"):
        read_config(quantized)


def test_modelopt_may_quantize_the_cache_alone(plain: Path) -> None:
    settings = json.loads((plain / "config.json").read_text())
    of_cache = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert build_model(settings | {"quantization_config": of_cache}, dtype=torch.float32).quantized_weights == {}


def test_modules_that_are_not_quantized(plain: Path) -> None:
    settings = json.loads((plain / "config.json").read_text())
    kept = "model.layers.1.mlp.down_proj"
    for config in (
        bnb(llm_int8_skip_modules=["lm_head", kept]),
        MODELOPT | {"ignore": ["lm_head", "model.layers.1.mlp.down*"]},
        QUARK | {"exclude": ["lm_head", r"re:model\.layers\.1\.mlp\.down.*"]},
        packed("mxfp4-pack-quantized", 32) | {"ignore": ["lm_head", kept]},
    ):
        spec = build_model(settings | {"quantization_config": config}, dtype=torch.float32)
        names = set(spec.quantized_weights)
        assert len(names) == 7 * LAYERS - 1
        assert f"{kept}.weight" not in names


def test_activations_that_are_not_quantized_are_told_once(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": FORMATS["nvfp4"]}
    config_fields._logged.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            build_model(settings, dtype=torch.float32)
    assert sum("NVFP4 weights are decoded in the kernels" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (packed("nvfp4-pack-quantized", 32), "config_groups.weights.group_size is 32"),
        (bnb(bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type is 'int4'"),
        (bnb(load_in_4bit=False), "needs one of load_in_4bit and load_in_8bit"),
        (bnb(bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage is 'bfloat16'"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        (MODELOPT | {"group_size": 32}, "group_size is 32"),
        (QUARK | {"global_quant_config": {"weight": {"dtype": "int4"}}}, "weight.dtype is 'int4'"),
    ],
)
def test_a_wrong_config_is_one_sentence(config: dict[str, Any], message: str, plain: Path) -> None:
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    with pytest.raises(ModelConfigError) as caught:
        build_model(settings, dtype=torch.float32)
    assert message in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_a_quant_state_without_its_offset_is_an_error(plain: Path, tmp_path: Path) -> None:
    quantized, _ = write(plain, tmp_path, "nf4-double")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if ".quant_state." in name:
            tensors[name] = torch.tensor(list(b'{"quant_type": "nf4"}'), dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((WeightError, ValueError), match="has no nested_offset"):
        load(quantized)

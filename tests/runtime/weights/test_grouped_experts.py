"""Experts of AWQ, GPTQ, auto-round, compressed-tensors, NVFP4, MXFP4 and bitsandbytes: exact values; on the CPU, their codes in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import load_weights, read_config
from tests.support.float4_checkpoints import float4_linear
from tests.support.group_checkpoints import packed_linear, write_grouped
from tests.support.loaded_checkpoints import CPU, KERNELS, load, logits
from tests.support.moe_models import write_moe
from tests.support.numbers import relative_error

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "modules_to_not_convert": ["mlp.gate"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "dynamic": {r"-:.*mlp\.gate$": {}}}
KEPT = {r".*mlp\.gate": {"bits": 16}}


def compressed(file_format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": {"group_0": group}, "ignore": ignore}


def bnb(**settings: Any) -> dict[str, Any]:
    kind = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", "gate"]} | kind | settings


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
FORMATS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq-act-order": GPTQ | {"desc_act": True},  # dequantized
    "gptq-3-bits": GPTQ | {"bits": 3},
    "gptq-v2-channel": GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1, "sym": True},
    "auto-round": {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "dynamic": None, "extra_config": KEPT},
    "auto-round-awq": {**AWQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "extra_config": KEPT},
    "w4a16": compressed("pack-quantized", **INT4 | {"symmetric": True}),
    "w4a16-zeros": compressed("pack-quantized", **INT4),
    "w8a16-channel": compressed("pack-quantized", **INT4 | {"num_bits": 8, "symmetric": True, "strategy": "channel", "group_size": None}),
    "nvfp4": compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16),
    "mxfp4": compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32),
    "nf4": bnb(),
    "fp4-double": bnb(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "nf4-double": bnb(bnb_4bit_use_double_quant=True),
    "llm-int8": bnb(load_in_4bit=False, load_in_8bit=True),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
}


SIZES = {"hidden_size": 128, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("plain"), "Qwen3MoeForCausalLM", **SIZES, moe_intermediate_size=64, num_experts=4)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its experts have other names."""
    return write_moe(tmp_path_factory.mktemp("mixtral"), "MixtralForCausalLM", **SIZES, intermediate_size=64, num_local_experts=4)


def write(plain: Path, folder: Path, name: str) -> tuple[Path, Path]:
    pack = float4_linear if "fp4" in name or FORMATS[name]["quant_method"] in ("modelopt", "bitsandbytes") else packed_linear
    return write_grouped(plain, folder, FORMATS[name], pack=pack)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["gptq-act-order", "gptq-3-bits", "w4a16-zeros", "nvfp4", "nf4-double", "llm-int8", "mixtral-awq"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["plain", "mixtral"])
def test_dequantized_experts_are_exact(name: str, family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    quantized, dequantized = write(request.getfixturevalue(family), tmp_path, name)
    found, expected = load(quantized), load(dequantized)
    held = dict(found.module.named_parameters())  # type: ignore[attr-defined]
    for key, value in expected.module.named_parameters():  # type: ignore[attr-defined]
        if "experts" in key:
            assert torch.equal(held[key], value), key


ON_CPU = ("awq", "gptq-3-bits", "nvfp4", "mxfp4", "nf4-double", "llm-int8")


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["awq"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_CPU else pytest.mark.slow) for name in FORMATS if "act-order" not in name]
)
def test_compiled_experts_keep_their_codes(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write(plain, tmp_path, name)
    spec = build_model(read_config(quantized), dtype=torch.float32)
    kernels = KERNELS | {"packed_experts"}
    config = CompileConfig(cache_dir=tmp_path / "cache", verify_passes=name == "awq")
    model = compile_model(spec, config, device=CPU, dtype=torch.float32, kernels=kernels)
    load_weights(model, spec, quantized, load_format="auto", device=CPU, dtype=torch.float32, seed=0)
    row = next(row for row in model.report["passes"] if row["name"] == "quantize_experts")
    assert (row["matched"], row["near_misses"]) == (1, [])
    assert relative_error(logits(model), logits(load(dequantized))) < 2e-3
    # The texts of bitsandbytes' states are large beside such small weights.
    tensors = load_file(quantized / "model.safetensors").items()
    stored = sum(t.nbytes for key, t in tensors if ".experts." in key and "quant_state" not in key and "quant_map" not in key)
    # Rows of 64 inputs are short, so their factors, one a row in some formats, are left out.
    held = sum(t.nbytes for key, t in model.weights.items() if "experts" in key and not key.endswith(".factor"))  # type: ignore[attr-defined]
    print(name, "takes", round(held / stored, 3), "of the file")
    assert held <= (1.35 if "3-bits" in name else 1.05) * stored  # codes of 3 bits are kept in 4


@pytest.mark.parametrize("name", ["nf4", "llm-int8"])
def test_experts_that_bitsandbytes_left_alone_are_found(name: str, plain: Path, tmp_path: Path) -> None:
    """As transformers 5 writes them: config.json does not say so. Routers are found, too."""
    names = [key.removesuffix(".weight") for key in load_file(plain / "model.safetensors") if ".experts." in key]
    config = FORMATS[name] | {"llm_int8_skip_modules": None}
    quantized, dequantized = write_grouped(plain, tmp_path, config, skipped=tuple(names), pack=float4_linear)
    found = load(quantized)
    assert found.spec.quantized_weights.keys() == {f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkvo"}  # type: ignore[attr-defined]
    assert torch.equal(logits(found), logits(load(dequantized)))


def test_experts_in_part_are_one_sentence(plain: Path) -> None:
    config = {**read_config(plain)}
    config["quantization_config"] = AWQ | {"modules_to_not_convert": ["mlp.gate", "experts.1.up_proj"]}
    with pytest.raises(ModelConfigError, match="only some of the experts' matrices of .*gate_up_proj: expected all or none"):
        build_model(config, dtype=torch.float32)

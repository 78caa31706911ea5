"""AWQ, GPTQ, auto-round and compressed-tensors W4A16 end to end: dequantized values are exact, and logits match the dequantized model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.custom_ops.quantized.round_activations import round_activations
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import WeightError
from tests.support.group_checkpoints import write_grouped
from tests.support.loaded_checkpoints import EAGER, load, logits
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
LAYERS = 2
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def w4a16(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FORMATS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq-zeros": GPTQ | {"sym": False},
    "gptq-act-order": GPTQ | {"desc_act": True, "sym": False},
    "gptq-v2-channel": GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1},
    "gptq-8-bits": GPTQ | {"bits": 8, "sym": False},
    "gptq-3-bits": GPTQ | {"bits": 3, "sym": False},
    "auto-round": GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
    "auto-round-awq": AWQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
    "w4a16": w4a16(),
    "w4a16-zeros": w4a16(symmetric=False),
    "w8a16-channel": w4a16(num_bits=8, strategy="channel", group_size=None),
    "w4a16-act-order": w4a16(actorder="group"),
}


def with_inputs(**inputs: Any) -> dict[str, Any]:
    """W4A8."""
    config = w4a16()
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True} | inputs
    config["config_groups"]["group_0"]["input_activations"] = token
    return config


COMPILED = ("awq", "gptq-act-order", "gptq-8-bits", "gptq-3-bits")  # w4a16 in test_activations_of_8_bits


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["gptq-act-order", "gptq-3-bits", "gptq-v2-channel", "w4a16-zeros"])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_weights_are_exact(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write_grouped(plain, tmp_path, FORMATS[name])
    model = load(quantized)
    held = dict(model.spec.module.named_parameters())  # type: ignore[attr-defined]
    held |= dict(model.module.named_parameters())  # type: ignore[attr-defined, union-attr]
    for key, expected in load_file(dequantized / "model.safetensors").items():
        assert torch.equal(held[key].float(), expected.float()), key


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["awq"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_logits(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write_grouped(plain, tmp_path, FORMATS[name])
    reference = logits(load(dequantized))
    model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache", verify_passes=name == "awq"))
    row = next(row for row in model.report["passes"] if row["name"] == "quantize_linears")
    assert (row["matched"], row["near_misses"]) == (4 * LAYERS, [])
    if name == "awq":
        assert [row for row in model.report["passes"] if row.get("verification", {}).get("reason")] == []
    assert relative_error(logits(model), reference) < 1e-3
    assert any(target.endswith("bits.packed") for target in model.weights)  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_float16_end_to_end(plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write_grouped(plain, tmp_path, AWQ)
    reference = logits(load(dequantized))
    model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache"), torch.float16)
    assert relative_error(logits(model, torch.float16), reference) < 5e-3


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["int"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_activations_of_8_bits(kind: str, plain: Path, tmp_path: Path) -> None:
    """W4A8: every quantized linear's input is rounded, as the reference that rounds x in torch does it."""
    config = with_inputs(type=kind)
    quantized, dequantized = write_grouped(plain, tmp_path, config)
    model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache", verify_passes=kind == "int"))
    row = next(row for row in model.report["passes"] if row["name"] == "quantize_linears")
    assert (row["matched"], row["near_misses"]) == (4 * LAYERS, [])
    dtype = torch.int8 if kind == "int" else torch.float8_e4m3fn
    reference = load(dequantized)
    for name, linear in reference.module.named_modules():  # type: ignore[attr-defined, union-attr]
        if name.endswith("_proj"):
            linear.register_forward_pre_hook(lambda _, inputs: (round_activations(inputs[0], dtype),))
    expected = logits(reference)
    unrounded = relative_error(logits(load(quantized)), expected)
    assert unrounded > 3e-3
    # Noise of 2e-5 changes the reference by a third of that: a value near the middle of two steps takes the other one.
    assert relative_error(logits(model), expected) < 0.5 * unrounded


@pytest.mark.slow
def test_modules_that_are_not_quantized(plain: Path, tmp_path: Path) -> None:
    skipped = ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj")
    config = AWQ | {"modules_to_not_convert": list(skipped)}
    quantized, dequantized = write_grouped(plain, tmp_path, config, skipped)
    model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache"))
    row = next(row for row in model.report["passes"] if row["name"] == "quantize_linears")
    assert (row["matched"], row["near_misses"]) == (4 * LAYERS - 1, [])  # q and v are merged without k
    reference = logits(load(dequantized))
    assert relative_error(logits(model), reference) < 1e-3


def test_dummy_weights_are_random_bits(plain: Path, tmp_path: Path) -> None:
    for config in (AWQ, FORMATS["gptq-act-order"], FORMATS["gptq-3-bits"], FORMATS["w4a16"]):
        settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        model = load(tmp_path, EAGER, load_format="dummy")
        weight = model.module.model.layers[0].mlp.up_proj.weight  # type: ignore[attr-defined, union-attr]
        assert 0.6 < weight.std() / settings["initializer_range"] < 1.2
        assert abs(weight.mean()) < 0.15 * weight.std()  # 0.11 where 8 of 0 to 15 means 0
        assert logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AWQ | {"version": "gemv"}, "version is 'gemv'"),
        (AWQ | {"bits": 3}, "bits is 3"),
        (AWQ | {"group_size": 48}, "group_size is 48, which does not divide the 128 inputs of model.layers.0"),
        (GPTQ | {"bits": 5}, "bits is 5"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"group_size": "big"}, "group_size is 'big': expected an integer"),
        (GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:gguf"}, "packing_format is"),
        (w4a16(num_bits=5), "num_bits is 5"),
        (with_inputs(dynamic=False), "config_groups.input_activations.dynamic is False"),
        (with_inputs(num_bits=4), "config_groups.input_activations.num_bits is 4"),
        (w4a16(strategy="tensor"), "strategy is 'tensor'"),
        ({"quant_method": "squeeze"}, "quant_method 'squeeze' is not supported"),
    ],
)
def test_a_wrong_config_is_one_sentence(config: dict[str, Any], message: str, plain: Path) -> None:
    settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    with pytest.raises(ModelConfigError) as caught:
        build_model(settings, dtype=torch.float32)
    assert message in str(caught.value)
    assert str(caught.value).count(". ") == 0


def test_scales_that_would_lose_bits_are_an_error(plain: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    quantized, _ = write_grouped(plain, tmp_path, AWQ)
    file = quantized / "model.safetensors"
    tensors = {n: t.float() * 1.0001 if n.endswith(".scales") else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match="is stored as torch.float32, but quantization_config makes it torch.float16"):
        load(quantized)

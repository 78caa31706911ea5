"""Quantized checkpoints end to end: values and scales reach the op, and the logits match the dequantized model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.rewrite.graph_pass import PassError
from compile_and_serve.custom_ops.quantized.quantized_linear import unpack_quantized_weight
from compile_and_serve.runtime.weights import WeightError
from tests.support.loaded_checkpoints import EAGER, load, logits, write_plain
from tests.support.numbers import relative_error
from tests.support.quantized_checkpoints import compressed_tensors_config, write_quantized

CPU = torch.device("cpu")
LAYERS = 2
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-channel": compressed_tensors_config("float", "channel", "token"),
    "fp8-tensor-static": compressed_tensors_config("float", "tensor", "static", file_format="naive-quantized"),
    "fp8-block": compressed_tensors_config("float", "block", "group"),
    "int8-channel": compressed_tensors_config("int", "channel", "token"),
    "int8-weights": compressed_tensors_config("int", "channel", None),
    "hf-blocks": FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.norm"]},
    "hf-static": {"quant_method": "fp8", "activation_scheme": "static"},
}
SAME_AS_OTHERS = ("fp8-tensor-static", "fp8-block")  # once loaded, they compile like another format


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16 whose sizes are multiples of the block size 128."""
    return write_plain(tmp_path_factory.mktemp("plain"), torch.bfloat16, num_key_value_heads=4)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["fp8-tensor-static", "fp8-block", "hf-blocks", "int8-channel"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, plain: Path, tmp_path: Path) -> None:
    quantized, dequantized = write_quantized(plain, tmp_path, FORMATS[name])
    eager = EAGER
    reference = logits(load(dequantized, eager))
    assert torch.equal(logits(load(quantized, eager)), reference)
    if name in SAME_AS_OTHERS:
        return

    model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache"))
    row = next(row for row in model.report["passes"] if row["name"] == "quantize_linears")
    assert (row["matched"], row["near_misses"]) == (4 * LAYERS, [])
    error = relative_error(logits(model), reference)
    assert error < (1e-5 if name == "int8-weights" else 0.05 if "int8" in name else 0.15)
    assert error > 1e-3 or name == "int8-weights"  # quantized activations must have an effect

    held = load_file(quantized / "model.safetensors")
    prefix = "model.layers.1.self_attn"
    target = next(t for t in model.weights if t.startswith(f"{prefix}.q_proj+k_proj+v_proj") and "packed" in t)  # type: ignore[attr-defined]
    values = unpack_quantized_weight(model.weights[target], 3 * 128, 128)  # type: ignore[attr-defined]
    merged = torch.cat([held[f"{prefix}.{part}_proj.weight"].float() for part in "qkv"])
    assert torch.equal(values.float(), merged)


@pytest.mark.slow
def test_a_linear_that_cannot_be_quantized_computes_with_dequantized_weights(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If one of three merged projections is not quantized, all three run dequantized: the report says so, and the log of each start."""
    config = compressed_tensors_config("int", "channel", None)
    config["ignore"].append("model.layers.1.self_attn.k_proj")
    quantized, dequantized = write_quantized(plain, tmp_path, config)
    tensors = load_file(quantized / "model.safetensors")
    key = "model.layers.1.self_attn.k_proj"
    tensors[f"{key}.weight"] = load_file(dequantized / "model.safetensors")[f"{key}.weight"]
    del tensors[f"{key}.weight_scale"]
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    for artifact in ("made", "hit"):
        caplog.clear()
        model = load(quantized, CompileConfig(cache_dir=tmp_path / "cache"))
        assert model.report["artifact"] == artifact
        row = next(row for row in model.report["passes"] if row["name"] == "quantize_linears")
        assert row["matched"] == 4 * LAYERS - 1
        assert [miss["reason"] for miss in row["near_misses"]] == ["only a part of the merged weight is to be quantized"]
        logged = [text for text in caplog.messages if text.startswith("pass quantize_linears did not rewrite")]
        assert [text.rpartition(": ")[2] for text in logged] == ["only a part of the merged weight is to be quantized"]
    reference = logits(load(dequantized))
    assert relative_error(logits(model), reference) < 1e-5


def test_dummy_weights_of_a_quantized_config(plain: Path, tmp_path: Path) -> None:
    for config in (FORMATS["fp8-channel"], FP8_BLOCKS, FORMATS["hf-static"]):
        settings = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        model = load(tmp_path, EAGER, load_format="dummy")
        weight = model.spec.module.model.layers[0].mlp.up_proj.weight  # type: ignore[attr-defined]
        assert 0.9 < weight.std() / settings["initializer_range"] < 1.1
        assert logits(model).isfinite().all()


def test_a_wrong_config_is_one_sentence(plain: Path, tmp_path: Path) -> None:
    quantized, _ = write_quantized(plain, tmp_path, FORMATS["int8-channel"])
    settings = json.loads((quantized / "config.json").read_text())
    for change, message in (
        (FORMATS["fp8-channel"], "is stored as torch.int8, but the model's config makes it torch.float8_e4m3fn"),
        (FORMATS["hf-blocks"], "lacks model.layers.0.self_attn.q_proj.weight_scale_inv"),
        (FORMATS["fp8-tensor-static"], r"proj.weight_scale in .* has shape \[128, 1\], but .* makes it \[1\]"),
        (None, "is stored as torch.int8, but the model's config makes it torch.bfloat16"),
    ):
        (quantized / "config.json").write_text(json.dumps(settings | {"quantization_config": change}))
        with pytest.raises(WeightError, match=message):
            load(quantized, EAGER, torch.bfloat16)


def test_contradicting_options_are_one_sentence(plain: Path, tmp_path: Path) -> None:
    quantized, _ = write_quantized(plain, tmp_path, FORMATS["int8-channel"])
    with pytest.raises(PassError, match="is already quantized, so it cannot be quantized to fp8: leave out --quantization"):
        load(quantized, CompileConfig(quantization="fp8"))
    with pytest.raises(PassError, match="leave out --quantization or --enforce-eager"):
        load(plain, CompileConfig(quantization="fp8", mode="eager"))

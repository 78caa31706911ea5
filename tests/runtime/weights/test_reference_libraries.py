"""Checkpoints that bitsandbytes and compressed-tensors wrote: our dequantized weights are theirs.

Skipped without these libraries: `pip install -e '.[references]'`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compile_and_serve.compiler import CompileConfig
from tests.runtime.weights.test_float4_checkpoints import FORMATS, load
from tests.support.group_checkpoints import write_grouped


def held_weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder, CompileConfig(mode="eager")).module.named_parameters())  # type: ignore[attr-defined, union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4-double", "fp4", "llm-int8"])
def test_bitsandbytes(name: str, plain: Path, tmp_path: Path) -> None:
    """Written and read by transformers with bitsandbytes. LLM.int8: its scale may be rounded in another order."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = {key: FORMATS[name][key] for key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")}
    model = AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.float32),
        device_map="cpu",
        dtype=torch.float32,
    )
    model.save_pretrained(tmp_path)
    held, compared = held_weights(tmp_path), 0
    for module_name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            expected = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(held[f"{module_name}.weight"], expected.float()), module_name
        elif type(module).__name__ == "Linear8bitLt":
            expected = module.weight.data.float() * module.weight.SCB.float()[:, None] / 127
            assert torch.allclose(held[f"{module_name}.weight"], expected, rtol=2e-7, atol=0), module_name
        else:
            continue
        compared += 1
    assert compared == 14


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_compressed_tensors(name: str, plain: Path, tmp_path: Path) -> None:
    """Packed by compressed-tensors' compressors, and unpacked by them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    compressor: Any = NVFP4PackedCompressor if name == "nvfp4" else MXFP4PackedCompressor
    size = 16 if name == "nvfp4" else 32
    strategy = "tensor_group" if name == "nvfp4" else "group"
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, type="float", group_size=size, strategy=strategy))

    def pack(module: str, weight: torch.Tensor, *_: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        weight = weight.float()
        largest = weight.unflatten(1, (-1, size)).abs().amax(2)
        state = {"weight": weight, "weight_scale": largest / 6}
        if name == "nvfp4":
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            state["weight_scale"] = (state["weight_scale"] * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        else:
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - 2)
        packed = compressor.compress(state, scheme)
        plain_weight = compressor.decompress(dict(packed), scheme)["weight"]
        return {f"{module}.{leaf}": tensor for leaf, tensor in packed.items()}, plain_weight

    quantized, dequantized = write_grouped(plain, tmp_path, FORMATS[name], pack=pack)
    held = held_weights(quantized)
    for key, expected in load_file(dequantized / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            # It computes in bfloat16.
            assert torch.allclose(held[key], expected.float(), rtol=2**-7, atol=1e-6), key

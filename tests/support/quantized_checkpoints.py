"""Tiny checkpoints in other projects' quantized formats, made from a plain one, and plain ones with the dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.custom_ops.quantization import LARGEST, block_scales, dequantize_weight, quantize_weight, row_scales


def compressed_tensors_config(
    kind: str,
    weights: str,
    activations: str | None,
    *,
    bits: int = 8,
    symmetric: bool = True,
    block: list[int] | None = None,
    file_format: str | None = None,
) -> dict[str, Any]:
    """weights: "tensor", "channel" or "block"; activations: "token", "group", "static" or None (weight-only)."""
    weight = {"num_bits": bits, "type": kind, "strategy": weights, "symmetric": symmetric, "dynamic": False}
    if weights == "block":
        weight["block_structure"] = block or [128, 128]
    inputs: dict[str, Any] | None = None
    if activations is not None:
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": activations != "static"}
        inputs["strategy"] = "tensor" if activations == "static" else activations
        inputs["group_size"] = 128 if activations == "group" else None
    group = {"targets": ["Linear"], "weights": weight, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format or f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def write_quantized(plain: Path, folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """`plain`'s linears but the head, quantized as `config` says. → the quantized checkpoint, and its dequantized weights."""
    tensors = load_file(plain / "model.safetensors")
    hugging_face = config["quant_method"] == "fp8"
    group = None if hugging_face else config["config_groups"]["group_0"]
    dtype = torch.int8 if group and group["weights"]["type"] == "int" else torch.float8_e4m3fn
    strategy = group["weights"]["strategy"] if group else "block" if config.get("weight_block_size") else "tensor"
    is_static = bool(group and group["input_activations"] and not group["input_activations"]["dynamic"])
    is_static |= config.get("activation_scheme") == "static"
    quantized, dequantized = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = dequantized[name] = tensor
            continue
        if strategy == "block":
            scale = stored = block_scales(tensor, dtype)
        elif strategy == "channel":
            scale = row_scales(tensor, dtype)
            stored = scale[:, None]
        else:
            stored = (tensor.abs().max().float() / LARGEST[dtype]).reshape(() if hugging_face else 1)
            scale = stored.reshape(1).expand(tensor.shape[0])
        quantized[name] = quantize_weight(tensor, scale, dtype)
        module = name.removesuffix(".weight")
        suffix = "weight_scale_inv" if hugging_face and strategy == "block" else "weight_scale"
        quantized[f"{module}.{suffix}"] = stored.contiguous()
        if is_static:
            quantized[f"{module}.input_scale"] = torch.tensor([12.0 / LARGEST[dtype]])
        dequantized[name] = dequantize_weight(quantized[name], scale.contiguous(), torch.float32)
    return write_pair(plain, folder, quantized, dequantized, {"quantization_config": config})


def write_pair(
    plain: Path, folder: Path, quantized: dict[str, torch.Tensor], dequantized: dict[str, torch.Tensor], settings: dict[str, Any]
) -> tuple[Path, Path]:
    """Copies of `plain` with other tensors. settings: of the first one's config.json"""
    paths = folder / "quantized", folder / "dequantized"
    for path, tensors in zip(paths, (quantized, dequantized), strict=True):
        shutil.copytree(plain, path)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    (paths[0] / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | settings))
    return paths

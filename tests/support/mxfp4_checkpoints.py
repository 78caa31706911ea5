"""A tiny random gpt-oss in the published MXFP4 layout, and the same weights unquantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.transformers_models import write_random_model

SIZES: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "sliding_window": 24,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"],
}


def write_gpt_oss(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """(a folder with the experts in MXFP4, a folder with transformers' own conversion of them), float32 otherwise."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = write_random_model(folder / "plain", "GptOssForCausalLM", **(SIZES | changes))
    packed = folder / "mxfp4"
    shutil.copytree(plain, packed)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    quantized = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 127, (num_experts, outputs, inputs // 32), dtype=torch.uint8)
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        # transformers' conversion is made for stacked [X, O, G, 16] and returns [X, I, O]
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantized, packed / "model.safetensors", metadata={"format": "pt"})
    return packed, plain

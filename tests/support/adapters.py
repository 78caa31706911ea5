"""Random LoRA adapters as PEFT saves them, and models with such adapters merged into their weights.

Shape legend: R an adapter's rank, I and O a linear's input and output features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Path,
    rank: int,
    *,
    targets: Iterable[str] = ALL,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.5,
    **config: Any,
) -> Path:
    """An adapter of a checkpoint's linears and embedding whose names end in `targets`. config: further entries of adapter_config.json.

    size: about how large B A x is, beside x, before it is scaled.
    """
    folder.mkdir(parents=True)
    tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for name, weight_OI in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(targets)):
            continue
        own_rank = next((r for key, r in config.get("rank_pattern", {}).items() if module.endswith(key)), rank)
        is_embedding = module.endswith("embed_tokens")
        out_features, in_features = reversed(weight_OI.shape) if is_embedding else weight_OI.shape
        a_RI = torch.randn(own_rank, in_features, generator=generator) * size / in_features**0.5
        b_OR = torch.randn(out_features, own_rank, generator=generator) * size
        if is_embedding:
            a_RI *= in_features**0.5  # one column of it is read
        form = "lora_embedding_{}" if is_embedding else "lora_{}.weight"
        tensors |= {f"base_model.model.{module}.{form.format(x)}": t for x, t in (("A", a_RI), ("B", b_OR))}
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder


def merge(model: Any, adapter: Path) -> Any:
    """transformers' model with an adapter merged into its weights, by the formula of the paper (of rsLoRA, if the config says so)."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a_RI in tensors.items():
        if not re.search(r"\.lora_(embedding_)?A", name):
            continue
        module = re.sub(r"^base_model\.model\.|\.lora_(A\.weight|embedding_A)$", "", name)
        b_OR = tensors[re.sub(r"(lora_|embedding_)A", r"\1B", name)]
        alpha = next((a for key, a in config.get("alpha_pattern", {}).items() if module.endswith(key)), config["lora_alpha"])
        rank = a_RI.shape[0]
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        change = scale * (b_OR @ a_RI)
        _weight(model, module).add_(change.T if module.endswith("embed_tokens") else change)
    return model


def _weight(model: Any, module: str) -> torch.Tensor:
    """A module's weight; of an expert's linear in a checkpoint's names, its rows in transformers' stacked weights."""
    block, experts, rest = module.partition(".experts.")
    if not experts:
        return model.get_submodule(module).weight.data
    number, _, leaf = rest.partition(".")
    stacked = model.get_submodule(f"{block.replace('block_sparse_moe', 'mlp')}.experts")
    if leaf in ("down_proj", "w2"):
        return stacked.down_proj.data[int(number)]
    gate, up = stacked.gate_up_proj.data[int(number)].chunk(2)
    return gate if leaf in ("gate_proj", "w1") else up

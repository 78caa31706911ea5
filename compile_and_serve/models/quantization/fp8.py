"""Hugging Face's `fp8`: blocks of 128 × 128 with `weight_scale_inv` (DeepSeek, Qwen3), or one `weight_scale` per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compile_and_serve.custom_ops.quantization import BLOCK
from compile_and_serve.custom_ops.stored_weight import QuantizedWeight, scaled_weight
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, linears_of, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import unsupported
from compile_and_serve.models.spec import ModelSpec

_ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts; they stay unquantized


@register_checkpoint_format(
    "fp8",
    fields=FormatFields(
        read="fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers",
        no_effect="dequantize scale_fmt",  # scale_fmt: the weights' scales are stored; those of activations are not rounded here
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    if config.get("fmt", "e4m3") != "e4m3":
        raise unsupported(f"fp8 weights in {config['fmt']!r}", "'e4m3'")
    scheme, block = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise unsupported(f"activation_scheme {scheme!r}", "'dynamic' or 'static'")
    if block is not None and (list(block) != [BLOCK, BLOCK] or scheme != "dynamic"):
        raise unsupported(f"fp8 blocks of {block} with {scheme} activations", f"blocks of [{BLOCK}, {BLOCK}] with dynamic activations")
    ignored = ["lm_head", *(config.get("modules_to_not_convert") or config.get("ignored_layers") or [])]
    found = _experts(config, spec)
    for name, linear in linears_of(spec).items():
        if name.rpartition(".")[2] in _ROUTERS:
            continue
        if any(f".{name}.".endswith(f".{other}.") or f"{name}.".startswith(f"{other}.") for other in ignored):
            continue
        found[f"{name}.weight"] = scaled_weight(
            f"{name}.weight",
            linear.weight.shape,
            torch.float8_e4m3fn,
            scale=f"{name}.{'weight_scale' if block is None else 'weight_scale_inv'}",
            scale_of="tensor" if block is None else "block",
            activations=scheme,
            input_scale=f"{name}.input_scale" if scheme == "static" else None,
        )
    return found


def _experts(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Stacked weights of experts [X, O, I]. Their scales are parts of stacked scales, as their matrices are of the stacked weights."""
    found: dict[str, QuantizedWeight] = {}
    for name, parameter in spec.module.named_parameters():
        if parameter.dim() != 3 or not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        if config.get("weight_block_size") is None or (name.endswith("gate_up_proj") and parameter.shape[1] // 2 % BLOCK):
            raise unsupported("fp8 experts without whole blocks of gate rows", f"blocks of [{BLOCK}, {BLOCK}]")
        scale, parts = f"{name}_scale_inv", {matrix: part for matrix, part in spec.parts.items() if part.parameter == name}
        found[name] = scaled_weight(
            name,
            parameter.shape,
            torch.float8_e4m3fn,
            scale=scale,
            scale_of="block",
            activations="dynamic",
            scale_parts={f"{matrix}_scale_inv": part.of_scales(scale, BLOCK) for matrix, part in parts.items()},
        )
    return found

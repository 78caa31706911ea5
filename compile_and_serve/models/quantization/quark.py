"""AMD Quark (`quark`): MXFP4, and float8 or int8 per tensor or channel."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK
from compile_and_serve.custom_ops.stored_weight import QuantizedWeight, scaled_weight
from compile_and_serve.models.quantization.checkpoint_format import (
    CacheDtype,
    FormatFields,
    linears_of,
    register_checkpoint_format,
    scheme_cache_dtype,
)
from compile_and_serve.models.quantization.config_fields import is_pattern_for, require, tell_about_activations
from compile_and_serve.models.quantization.mxfp4 import mxfp4_weight
from compile_and_serve.models.spec import ModelSpec


def _cache_dtype(config: Mapping[str, Any]) -> CacheDtype | None:
    export = config.get("export")
    return "fp8" if isinstance(export, dict) and export.get("kv_cache_group") else scheme_cache_dtype(config)


@register_checkpoint_format(
    "quark",
    cache_dtype=_cache_dtype,
    fields=FormatFields(
        read="export exclude layer_quant_config global_quant_config kv_cache_scheme",
        expected={"layer_type_quant_config": (), "softmax_quant_spec": ()},
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    excluded = config.get("exclude") or []
    found: dict[str, QuantizedWeight] = {}
    for name, linear in linears_of(spec).items():
        if any(fnmatchcase(name, pattern) or is_pattern_for(pattern, name) for pattern in excluded):
            continue
        own = config.get("layer_quant_config") or {}
        settings = next((value for key, value in own.items() if fnmatchcase(name, key)), config.get("global_quant_config") or {})
        weight, inputs = settings.get("weight") or {}, settings.get("input_tensors")
        require("weight.dtype", weight.get("dtype"), ("fp4", "fp8_e4m3", "int8"))
        if weight["dtype"] == "fp4":
            require("weight.qscheme", weight.get("qscheme"), ("per_group",))
            require("weight.group_size", weight.get("group_size"), (MX_BLOCK,))
            require("weight.scale_format", weight.get("scale_format", "e8m0"), ("e8m0",))
            if inputs is not None:
                tell_about_activations("MXFP4", 4)
            found[f"{name}.weight"] = mxfp4_weight(name, linear, codes="weight")
            continue
        require("weight.qscheme", weight.get("qscheme"), ("per_tensor", "per_channel"))
        require("weight.symmetric", weight.get("symmetric", True) is not False, (True,))
        is_dynamic = inputs is not None and bool(inputs.get("is_dynamic"))
        if inputs is not None:
            require("input_tensors.qscheme", inputs.get("qscheme"), ("per_channel",) if is_dynamic else ("per_tensor",))
        static = inputs is not None and not is_dynamic
        found[f"{name}.weight"] = scaled_weight(
            f"{name}.weight",
            linear.weight.shape,
            torch.float8_e4m3fn if weight["dtype"] == "fp8_e4m3" else torch.int8,
            scale=f"{name}.weight_scale",
            scale_of="tensor" if weight["qscheme"] == "per_tensor" else "row",
            activations="none" if inputs is None else "dynamic" if is_dynamic else "static",
            input_scale=f"{name}.input_scale" if static else None,
            unused=(f"{name}.weight_zero_point", f"{name}.input_zero_point"),
        )
    return found

"""NVIDIA ModelOpt (`modelopt`, `modelopt_fp4`): FP8 and NVFP4, from config.json or hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from compile_and_serve.custom_ops.stored_weight import QuantizedWeight, scaled_weight
from compile_and_serve.models.quantization.checkpoint_format import CacheDtype, FormatFields, register_checkpoint_format, scheme_cache_dtype
from compile_and_serve.models.quantization.config_fields import is_ignored, require, tell_about_activations
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.quantization.nvfp4 import NVFP4_GROUP, nvfp4_weight
from compile_and_serve.models.spec import ModelSpec


def _cache_dtype(config: Mapping[str, Any]) -> CacheDtype | None:
    algorithm = config.get("kv_cache_quant_algo")  # of hf_quant_config.json
    return {"FP8": "fp8", "INT8": "int8"}.get(algorithm) if algorithm is not None else scheme_cache_dtype(config)  # type: ignore[return-value]


@register_checkpoint_format(
    "modelopt",
    "modelopt_fp4",
    cache_dtype=_cache_dtype,
    fields=FormatFields(
        read="quant_algo kv_cache_quant_algo kv_cache_scheme ignore exclude_modules quantized_layers group_size",
        expected={"has_zero_point": (False,), "pre_quant_scale": (False,)},
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    excluded = [*(config.get("ignore") or []), *(config.get("exclude_modules") or [])]
    mixed = config.get("quantized_layers") or {}
    found: dict[str, QuantizedWeight] = {}
    if config.get("quant_algo", "") is None:  # only the KV cache is quantized
        return found
    for name, linear in matrices_of(spec).items():
        algorithm = str(config.get("quant_algo", "")).upper()
        if algorithm == "MIXED_PRECISION":
            if name not in mixed:
                continue
            algorithm = str(mixed[name].get("quant_algo", "")).upper()
        elif any(fnmatchcase(name, pattern) or is_ignored(name, [pattern]) for pattern in excluded):
            continue
        require("quant_algo", algorithm, ("FP8", "NVFP4"))
        if algorithm == "NVFP4":
            require("group_size", config.get("group_size", NVFP4_GROUP), (NVFP4_GROUP,))
            tell_about_activations("NVFP4", 4)
            found[f"{name}.weight"] = nvfp4_weight(name, linear, codes="weight", factor="weight_scale_2", divides=False)
            continue
        found[f"{name}.weight"] = scaled_weight(
            f"{name}.weight",
            linear.weight.shape,
            torch.float8_e4m3fn,
            scale=f"{name}.weight_scale",
            scale_of="tensor",
            activations="static",
            input_scale=f"{name}.input_scale",
        )
    return found

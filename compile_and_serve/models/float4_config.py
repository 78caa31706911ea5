"""Linears that a checkpoint stores as 4-bit floating-point numbers or indices of a table, and ModelOpt's and Quark's configs.

- NVFP4: e2m1 codes, a float8_e4m3fn scale for 16 inputs and a float32 scale for the tensor, which compressed-tensors
  (`nvfp4-pack-quantized`) divides by and ModelOpt multiplies by.
- MXFP4: e2m1 codes and a power of two for 32 inputs: compressed-tensors' `mxfp4-pack-quantized`, Quark.
- bitsandbytes: NF4 and FP4 codes in blocks of 64, with or without double quantization; LLM.int8's weights, one scale per output.

Activations stay in the model's dtype, also where a checkpoint was made for 4-bit activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.quantization import GroupedWeight, QuantizedWeight, StoredWeight
from compile_and_serve.custom_ops.quantized.group_formats import NESTED_BLOCK, QUANT_STATE, STATE_BYTES
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.config_fields import is_ignored, is_pattern_for, require, tell_once

NVFP4_FORMAT, MXFP4_FORMAT = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_NVFP4_GROUP, _MXFP4_GROUP, _BITSANDBYTES_BLOCK = 16, 32, 64
_FLOAT8 = torch.float8_e4m3fn


def nvfp4_weight(name: str, linear: nn.Linear, *, codes: str, factor: str, divides: bool) -> GroupedWeight:
    """A linear in NVFP4. codes, factor: names of the codes and of the tensor's scale. divides: the scale divides."""
    out_features, in_features = linear.weight.shape
    _require_whole_groups(name, in_features, _NVFP4_GROUP, "NVFP4")
    scale = f"{name}.weight_scale"
    return GroupedWeight(
        bits=4,
        group_size=_NVFP4_GROUP,
        tensors=(
            (f"{name}.{codes}", (out_features, in_features // 2), torch.uint8),
            (scale, (out_features, in_features // _NVFP4_GROUP), _FLOAT8),
            (f"{name}.{factor}", (1,), torch.float32),
        ),
        codes=("low_nibble_first", f"{name}.{codes}"),
        scale=("divided_scales" if divides else "scaled_scales", scale, f"{name}.{factor}"),
        table="e2m1",
        unused=(f"{name}.input_global_scale", f"{name}.input_scale"),
    )


def mxfp4_weight(name: str, linear: nn.Linear, *, codes: str) -> GroupedWeight:
    """A linear in MXFP4. codes: name of the codes."""
    out_features, in_features = linear.weight.shape
    _require_whole_groups(name, in_features, _MXFP4_GROUP, "MXFP4")
    return GroupedWeight(
        bits=4,
        group_size=_MXFP4_GROUP,
        tensors=(
            (f"{name}.{codes}", (out_features, in_features // 2), torch.uint8),
            (f"{name}.weight_scale", (out_features, in_features // _MXFP4_GROUP), torch.uint8),
        ),
        codes=("low_nibble_first", f"{name}.{codes}"),
        scale=("powers_of_two", f"{name}.weight_scale"),
        table="e2m1",
    )


def packed_float4(
    name: str, linear: nn.Linear, file_format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> GroupedWeight:
    """A linear in compressed-tensors' NVFP4 or MXFP4. weights, inputs: the group's."""
    is_nvfp4 = file_format == NVFP4_FORMAT
    require("config_groups.weights.num_bits", weights.get("num_bits"), (4,))
    require("config_groups.weights.type", weights.get("type"), ("float",))
    require("config_groups.weights.symmetric", weights.get("symmetric", True), (True,))
    require("config_groups.weights.group_size", weights.get("group_size"), (_NVFP4_GROUP if is_nvfp4 else _MXFP4_GROUP,))
    if inputs is not None:
        tell_about_activations("NVFP4" if is_nvfp4 else "MXFP4", inputs.get("num_bits"))
    if is_nvfp4:
        return nvfp4_weight(name, linear, codes="weight_packed", factor="weight_global_scale", divides=True)
    return mxfp4_weight(name, linear, codes="weight_packed")


def tell_about_activations(what: str, bits: Any) -> None:
    """Log once that activations are not quantized."""
    tell_once(
        f"{what} weights are decoded in the kernels; activations stay in the model's dtype, although the checkpoint is for {bits} bits."
    )


def modelopt_weights(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, StoredWeight]:
    """The weights of NVIDIA ModelOpt's formats FP8 and NVFP4, from config.json or hf_quant_config.json."""
    excluded = [*(config.get("ignore") or []), *(config.get("exclude_modules") or [])]
    mixed = config.get("quantized_layers") or {}
    found: dict[str, StoredWeight] = {}
    if config.get("quant_algo", "") is None:  # only the KV cache is quantized
        return found
    for name, linear in linears.items():
        algorithm = str(config.get("quant_algo", "")).upper()
        if algorithm == "MIXED_PRECISION":
            if name not in mixed:
                continue
            algorithm = str(mixed[name].get("quant_algo", "")).upper()
        elif any(fnmatchcase(name, pattern) or is_ignored(name, [pattern]) for pattern in excluded):
            continue
        require("quant_algo", algorithm, ("FP8", "NVFP4"))
        if algorithm == "NVFP4":
            require("group_size", config.get("group_size", _NVFP4_GROUP), (_NVFP4_GROUP,))
            tell_about_activations("NVFP4", 4)
            found[f"{name}.weight"] = nvfp4_weight(name, linear, codes="weight", factor="weight_scale_2", divides=False)
            continue
        found[f"{name}.weight"] = QuantizedWeight(
            dtype=_FLOAT8, scale=f"{name}.weight_scale", scale_shape=(1,), activations="static", input_scale=f"{name}.input_scale"
        )
    return found


def quark_weights(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, StoredWeight]:
    """The weights of AMD Quark's formats MXFP4, and float8 or int8 per tensor or channel."""
    excluded = config.get("exclude") or []
    found: dict[str, StoredWeight] = {}
    for name, linear in linears.items():
        if any(fnmatchcase(name, pattern) or is_pattern_for(pattern, name) for pattern in excluded):
            continue
        own = config.get("layer_quant_config") or {}
        settings = next((value for key, value in own.items() if fnmatchcase(name, key)), config.get("global_quant_config") or {})
        weight, inputs = settings.get("weight") or {}, settings.get("input_tensors")
        require("weight.dtype", weight.get("dtype"), ("fp4", "fp8_e4m3", "int8"))
        if weight["dtype"] == "fp4":
            require("weight.qscheme", weight.get("qscheme"), ("per_group",))
            require("weight.group_size", weight.get("group_size"), (_MXFP4_GROUP,))
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
        found[f"{name}.weight"] = QuantizedWeight(
            dtype=_FLOAT8 if weight["dtype"] == "fp8_e4m3" else torch.int8,
            scale=f"{name}.weight_scale",
            scale_shape=(1,) if weight["qscheme"] == "per_tensor" else (linear.weight.shape[0], 1),
            activations="none" if inputs is None else "dynamic" if is_dynamic else "static",
            input_scale=f"{name}.input_scale" if static else None,
            unused=(f"{name}.weight_zero_point", f"{name}.input_zero_point"),
        )
    return found


def bitsandbytes_weights(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, StoredWeight]:
    """The weights of bitsandbytes: NF4 and FP4, or LLM.int8's. Activations are not rounded to 8 bits, other than in LLM.int8."""
    in_4_bits, in_8_bits = config.get("load_in_4bit", False), config.get("load_in_8bit", False)
    if in_4_bits is in_8_bits:
        raise ModelConfigError("quantization_config needs one of load_in_4bit and load_in_8bit to be true.")
    skipped = config.get("llm_int8_skip_modules")
    skipped = ["lm_head"] if skipped is None else skipped
    kept = {name: linear for name, linear in linears.items() if not is_ignored(name, skipped)}
    if in_8_bits:
        tell_once("LLM.int8 weights are multiplied with unquantized activations here, so that outliers need no second product.")
        return {f"{name}.weight": _llm_int8_weight(name, linear) for name, linear in kept.items()}
    kind = config.get("bnb_4bit_quant_type", "fp4")
    require("bnb_4bit_quant_type", kind, ("nf4", "fp4"))
    storage = config.get("bnb_4bit_quant_storage", "uint8")
    require("bnb_4bit_quant_storage", storage, ("uint8",))
    is_double = config.get("bnb_4bit_use_double_quant", False)
    return {f"{name}.weight": _bitsandbytes_weight(name, linear, kind, is_double) for name, linear in kept.items()}


def _bitsandbytes_weight(name: str, linear: nn.Linear, kind: str, is_double: bool) -> GroupedWeight:
    out_features, in_features = linear.weight.shape
    _require_whole_groups(name, in_features, _BITSANDBYTES_BLOCK, "bitsandbytes")
    weight, blocks = f"{name}.weight", out_features * in_features // _BITSANDBYTES_BLOCK
    state = f"{weight}{QUANT_STATE}{kind}"
    packed = (weight, (out_features * in_features // 2, 1), torch.uint8)
    if not is_double:
        scales = [(f"{weight}.absmax", (blocks,), torch.float32)]
        scale: tuple[Any, ...] = ("block_maxima", f"{weight}.absmax", out_features)
    else:
        scales = [
            (f"{weight}.absmax", (blocks,), torch.uint8),
            (f"{weight}.nested_quant_map", (256,), torch.float32),
            (f"{weight}.nested_absmax", (-(-blocks // NESTED_BLOCK),), torch.float32),
            (state, (STATE_BYTES,), torch.uint8),
        ]
        scale = ("nested_maxima", *(tensor for tensor, _, _ in scales), out_features)
    return GroupedWeight(
        bits=4,
        group_size=_BITSANDBYTES_BLOCK,
        tensors=(packed, *scales),
        codes=("high_nibble_first", weight, out_features, in_features),
        scale=scale,
        table=kind,
        unused=(f"{weight}.quant_map", state),
    )


def _llm_int8_weight(name: str, linear: nn.Linear) -> QuantizedWeight:
    return QuantizedWeight(
        dtype=torch.int8,
        scale=f"{name}.SCB",
        scale_shape=(linear.weight.shape[0],),
        activations="none",
        scale_function="scb_to_rows",
        unused=(f"{name}.weight_format",),
    )


def _require_whole_groups(name: str, in_features: int, size: int, what: str) -> None:
    if in_features % size:
        raise ModelConfigError(
            f"{name} has {in_features} inputs, which the {size} values of a scale in {what} do not divide: this is not supported."
        )

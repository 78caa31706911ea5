"""`compressed-tensors` (llm-compressor).

- float-quantized, int-quantized and naive-quantized: 8 bits per tensor, channel or block of 128 × 128, `weight_scale`.
- pack-quantized: 4 or 8 bits per group or channel, symmetric or not: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx`.
- nvfp4-pack-quantized and mxfp4-pack-quantized: `nvfp4.py`, `mxfp4.py`.

Each expert's linears are stored alone, with scales beside them. As with unquantized experts, their tensors are parts of stacked ones: the
values [X, O, I], the scales, and packed codes. Scales of static activations are not read.

Shape legend: X experts, O and I output and input features (of a stacked weight), P its matrices (gate and up: 2), G groups of inputs.
Source: compressed-tensors' `pack_to_int32` (values + 2^(bits − 1)).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.quantization import BLOCK, Activations, dtype_name
from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK
from compile_and_serve.custom_ops.stored_weight import (
    GroupedParts,
    QuantizedWeight,
    StoredTensor,
    StoredWeight,
    TensorPart,
    near_middle,
    scaled_weight,
    shuffled_groups,
)
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, linears_of, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import integer, require, tell_about_activations, tell_once, unsupported
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.quantization.groups import groups_of, scales_tensor, unpack_bits
from compile_and_serve.models.quantization.mxfp4 import mxfp4_weight
from compile_and_serve.models.quantization.nvfp4 import NVFP4_GROUP, nvfp4_weight
from compile_and_serve.models.spec import ModelSpec

_PACKED, _NVFP4, _MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_FILE_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED, _NVFP4, _MXFP4)
_8BIT_DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
_SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """One of `config_groups`. model_dtype: the config's, which scales of packed codes have."""

    targets: Sequence[str]
    ignored: Sequence[str]
    file_format: str | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    model_dtype: Any

    def covers(self, module: str) -> bool:
        return _is_target(module, self.targets) and not _is_target(module, self.ignored)


@register_checkpoint_format(
    "compressed-tensors",
    fields=FormatFields(
        read="config_groups format ignore kv_cache_scheme",
        no_effect="quantization_status global_compression_ratio run_compressed dequantize use_optimized_inference version",
        expected={"transform_config": (), "sparsity_config": ({"format": "dense"},)},
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, StoredWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    found: dict[str, StoredWeight] = {}
    stacked: dict[str, dict[str, TensorPart]] = {}  # stacked weight → checkpoint tensor → part
    for name, part in spec.parts.items():
        stacked.setdefault(part.parameter, {})[name] = part
    parameters, matrices = dict(spec.module.named_parameters()), matrices_of(spec)
    for settings in (config.get("config_groups") or {}).values():
        group = _Group(
            targets=settings.get("targets") or [],
            ignored=config.get("ignore") or [],
            file_format=settings.get("format") or config.get("format"),
            weights=settings.get("weights") or {},
            inputs=settings.get("input_activations"),
            model_dtype=spec.config.get("torch_dtype") or spec.config.get("dtype"),
        )
        chosen = {name: linear for name, linear in linears_of(spec).items() if group.covers(name)}
        if settings.get("weights") is None and not chosen:  # attention: `scheme_cache_dtype` reads its `kv_cache_scheme`
            continue
        if group.file_format not in _FILE_FORMATS:
            raise ModelConfigError(
                f"The checkpoint's compressed-tensors format {group.file_format!r} is not supported: expected one of "
                f"{', '.join(_FILE_FORMATS)}."
            )
        found |= {f"{name}.weight": _linear(name, linear, group) for name, linear in chosen.items()}
        for name, parts in stacked.items():
            covered = [group.covers(matrix.removesuffix(".weight")) for matrix in parts]
            if not any(covered):
                continue
            if not all(covered):
                raise ModelConfigError(f"quantization_config covers only some of the experts' matrices of {name}: expected all or none.")
            if group.file_format in (_PACKED, _NVFP4, _MXFP4):
                found |= {
                    matrix: _linear(matrix.removesuffix(".weight"), matrices[matrix.removesuffix(".weight")], group) for matrix in parts
                }
            else:
                found[name] = _8bit_experts(name, parameters[name], parts, group)
    return found


def _linear(name: str, linear: nn.Linear, group: _Group) -> QuantizedWeight:
    if group.file_format in (_NVFP4, _MXFP4):
        return _float4(name, linear, group)
    if group.file_format == _PACKED:
        return _packed(name, linear, group)
    dtype, activations, scale_of = _scheme(group.weights, group.inputs)
    return scaled_weight(
        f"{name}.weight",
        linear.weight.shape,
        dtype,
        scale=f"{name}.weight_scale",
        scale_of=scale_of,
        activations=activations,
        input_scale=f"{name}.input_scale" if activations == "static" else None,
    )


def _scheme(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> tuple[torch.dtype, Activations, Literal["tensor", "row", "block"]]:
    """(the weights' dtype, how activations are quantized, what has a scale)."""
    kind, strategy = weights.get("type"), weights.get("strategy")
    scheme = f"{weights.get('num_bits')}-bit {kind} weights per {strategy}"
    if weights.get("num_bits") != 8 or kind not in _8BIT_DTYPES or not weights.get("symmetric", True):
        raise unsupported(scheme, "symmetric 8-bit weights")
    if strategy not in ("tensor", "channel", "block"):
        raise unsupported(scheme, "scales per tensor, channel or block")
    if strategy == "block" and list(weights.get("block_structure") or []) != [BLOCK, BLOCK]:
        raise unsupported(f"{scheme} of {weights.get('block_structure')}", f"blocks of [{BLOCK}, {BLOCK}]")
    scale_of: Literal["tensor", "row", "block"] = "row" if strategy == "channel" else strategy
    if inputs is None:
        return _8BIT_DTYPES[kind], "none", scale_of
    scheme = f"{inputs.get('num_bits')}-bit {inputs.get('type')} activations per {inputs.get('strategy')} over {scheme}"
    if inputs.get("num_bits") != 8 or inputs.get("type") != kind or not inputs.get("symmetric", True):
        raise unsupported(scheme, "symmetric activations of the weights' type")
    expected = "group" if strategy == "block" else "token" if inputs.get("dynamic") else "tensor"
    if inputs.get("strategy") != expected or (expected == "group" and inputs.get("group_size") not in (None, BLOCK)):
        raise unsupported(scheme, "dynamic activations per token (with blocks: per group of 128) or static activations per tensor")
    return _8BIT_DTYPES[kind], "dynamic" if inputs.get("dynamic") else "static", scale_of


def _float4(name: str, linear: nn.Linear, group: _Group) -> QuantizedWeight:
    what, size = ("NVFP4", NVFP4_GROUP) if group.file_format == _NVFP4 else ("MXFP4", MX_BLOCK)
    require("config_groups.weights.num_bits", group.weights.get("num_bits"), (4,))
    require("config_groups.weights.type", group.weights.get("type"), ("float",))
    require("config_groups.weights.symmetric", group.weights.get("symmetric", True), (True,))
    require("config_groups.weights.group_size", group.weights.get("group_size"), (size,))
    if group.inputs is not None:
        tell_about_activations(what, group.inputs.get("num_bits"))
    if what == "NVFP4":
        return nvfp4_weight(name, linear, codes="weight_packed", factor="weight_global_scale", divides=True)
    return mxfp4_weight(name, linear, codes="weight_packed")


def _packed(name: str, linear: nn.Linear, group: _Group) -> QuantizedWeight:
    weights = group.weights
    bits: int = weights.get("num_bits", 0)
    require("config_groups.weights.num_bits", bits, (4, 8))
    require("config_groups.weights.type", weights.get("type", "int"), ("int",))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    require("config_groups.weights.strategy", strategy, ("group", "channel"))
    actorder = weights.get("actorder")
    require("config_groups.weights.actorder", actorder, (None, False, "weight", "static", "group", "dynamic"))
    out_features, in_features = linear.weight.shape
    size = -1 if strategy == "channel" else integer(weights, "group_size", 128)
    group_size, groups = groups_of(name, in_features, size)
    scale_dtype = _SCALE_DTYPES.get(str(group.model_dtype), torch.float32)
    codes = StoredTensor(name=f"{name}.weight_packed", shape=(out_features, -(-in_features * bits // 32)), dtype=torch.int32)
    scale = scales_tensor(f"{name}.weight_scale", (out_features, groups), scale_dtype, bits)
    shape = -(-out_features * bits // 32), groups
    zeros = StoredTensor(name=f"{name}.weight_zero_point", shape=shape, dtype=torch.int32, fill=near_middle(bits))
    order = StoredTensor(name=f"{name}.weight_g_idx", shape=(in_features,), dtype=torch.int32, fill=shuffled_groups(group_size))
    is_symmetric, has_order = weights.get("symmetric", True), actorder in ("group", "dynamic") and groups > 1
    return QuantizedWeight(
        parts=GroupedParts(
            bits=bits,
            group_size=group_size,
            codes=("packed_rows", codes.name, bits, in_features),
            scale=scale.name,
            offset=None if is_symmetric else ("packed_columns", zeros.name, bits, out_features),
            input_groups=order.name if has_order else None,
            activations=None if group.inputs is None else _activations(group.inputs),
        ),
        tensors=(codes, scale, *([] if is_symmetric else [zeros]), *([order] if has_order else [])),
        unused=(f"{name}.weight_shape", order.name, zeros.name),
    )


def _activations(inputs: Mapping[str, Any]) -> torch.dtype:
    """The dtype to which compressed-tensors' `input_activations` are rounded in W4A8."""
    field = "config_groups.input_activations"
    require(f"{field}.num_bits", inputs.get("num_bits"), (8,))
    require(f"{field}.type", inputs.get("type"), ("int", "float"))
    require(f"{field}.dynamic", inputs.get("dynamic"), (True,))
    require(f"{field}.strategy", inputs.get("strategy"), ("token",))
    require(f"{field}.symmetric", inputs.get("symmetric", True), (True,))
    dtype = torch.int8 if inputs["type"] == "int" else torch.float8_e4m3fn
    tell_once(
        f"Activations of 4-bit linears are rounded to {dtype_name(dtype)} as the checkpoint wants, then multiplied by the kernels of "
        "4-bit weights with unquantized activations."
    )
    return dtype


def _8bit_experts(name: str, parameter: nn.Parameter, parts: Mapping[str, TensorPart], group: _Group) -> QuantizedWeight:
    dtype, activations, scale_of = _scheme(group.weights, group.inputs)
    outputs, scale, rows = parameter.shape[1], f"{name}_scale", min(part.num_rows for part in parts.values())
    if scale_of == "block" and rows < outputs and rows % BLOCK:
        raise ModelConfigError(f"{name} has scales for blocks of {BLOCK} rows, which do not divide the {rows} rows of an expert's gate.")
    rows_per_scale = {"tensor": rows, "row": 1, "block": BLOCK}[scale_of]
    return scaled_weight(
        name,
        parameter.shape,
        dtype,
        scale=scale,
        scale_of=scale_of,
        activations=activations,
        scale_parts={f"{matrix}_scale": part.of_scales(scale, rows_per_scale) for matrix, part in parts.items()},
        unused=tuple(f"{matrix.removesuffix('.weight')}.input_scale" for matrix in parts),
    )


def _is_target(name: str, targets: Sequence[str]) -> bool:
    """compressed-tensors' rule: a target is a module's name, its class's name, or `re:` with a pattern for `re.match`."""
    return any(re.match(target[3:], name) is not None if target.startswith("re:") else target in (name, "Linear") for target in targets)


@weight_function("packed_rows")
def packed_rows(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """compressed-tensors' weight_packed, int32 [O, I · bits / 32] → uint8 [O, count]"""
    return unpack_bits(words, bits, count)


@weight_function("packed_columns")
def packed_columns(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """compressed-tensors' weight_zero_point, int32 [O · bits / 32, G] → uint8 [count, G]"""
    return unpack_bits(words.t(), bits, count).t().contiguous()

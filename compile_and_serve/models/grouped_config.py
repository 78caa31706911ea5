"""Linears that a checkpoint stores as 4-bit or 8-bit codes with scales per group of inputs, from its `quantization_config`.

- `awq` (AutoAWQ, version "gemm"): 4 bits with zero points, `qweight`, `qzeros`, `scales`.
- `gptq` (AutoGPTQ, GPTQModel): 2, 3, 4 and 8 bits, with or without act-order (`desc_act`), the same names and `g_idx`. The format "gptq"
  stores zero points minus 1, "gptq_v2" as they are.
- `auto-round`: either of them, as `packing_format` says.
- `gguf`: blocks of a .gguf file, whose config the loader derives from its tensors. Embeddings are quantized, too.
- compressed-tensors' `pack-quantized`: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.quantization import GroupedWeight, dtype_name
from compile_and_serve.custom_ops.quantized.gguf_formats import GGUF_FORMATS
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.config_fields import as_list, integer, is_ignored, require, tell_once

PACKED_FORMAT = "pack-quantized"
_WHOLE = 128  # one group per output is a group of the inputs, rounded up to this multiple
_KERNEL_GROUP = 16  # groups are multiples of this
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def grouped_weights(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, GroupedWeight] | None:
    """Parameter name → how the checkpoint stores it; None for other quantization methods. Raises `ModelConfigError`."""
    method = config.get("quant_method")
    if method == "awq":
        return _awq(config, linears)
    if method == "gptq":
        return _gptq(config, linears)
    if method in ("auto-round", "intel/auto-round"):
        return _auto_round(config, linears)
    return None


def gguf_weights(config: Mapping[str, Any], module: nn.Module) -> dict[str, GroupedWeight]:
    """Parameter name → its blocks, for the linears and embeddings of a .gguf file."""
    kinds = config.get("tensors") or {}
    owners = [child for child in module.modules() if isinstance(child, nn.Linear | nn.Embedding)]
    parameters = {id(owner.weight) for owner in owners}
    found: dict[str, GroupedWeight] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) not in parameters or name not in kinds:
            continue
        form, kind = GGUF_FORMATS[kinds[name]], kinds[name]
        if parameter.shape[1] % form.block_inputs:
            continue
        num_bytes = parameter.shape[1] // form.block_inputs * form.block_bytes
        found[name] = GroupedWeight(
            bits=form.bits,
            group_size=form.group_size,
            tensors=((name, (parameter.shape[0], num_bytes), torch.uint8),),
            codes=(f"gguf_codes.{kind}", name),
            scale=(f"gguf_scale.{kind}", name),
            offset=None if form.offset is None else (f"gguf_offset.{kind}", name),
        )
    return found


def _awq(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, GroupedWeight]:
    bits = config.get("bits", config.get("w_bit", 4))
    require("bits", bits, (4,))
    require("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    require("zero_point", config.get("zero_point", True), (True,))
    group_size = integer(config, "group_size", config.get("q_group_size", 128))
    ignored = ["lm_head", *(config.get("modules_to_not_convert") or [])]
    return {f"{name}.weight": awq_weight(name, linear, group_size) for name, linear in linears.items() if not is_ignored(name, ignored)}


def awq_weight(name: str, linear: nn.Linear, group_size: int) -> GroupedWeight:
    """A linear in AWQ's format: qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales float16 [G, O]."""
    out_features, in_features = linear.weight.shape
    group_size, groups = _groups(name, in_features, group_size)
    _require_multiple(name, "outputs", out_features, 8)
    return GroupedWeight(
        bits=4,
        group_size=group_size,
        tensors=(
            (f"{name}.qweight", (in_features, out_features // 8), torch.int32),
            (f"{name}.qzeros", (groups, out_features // 8), torch.int32),
            (f"{name}.scales", (groups, out_features), torch.float16),
        ),
        codes=("awq_codes", f"{name}.qweight"),
        scale=("transposed", f"{name}.scales"),
        offset=("awq_codes", f"{name}.qzeros"),
    )


def _gptq(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, GroupedWeight]:
    file_format = config.get("checkpoint_format") or config.get("format") or "gptq"
    require("checkpoint_format", file_format, ("gptq", "gptq_v2"))
    only = [name for names in config.get("modules_in_block_to_quantize") or [] for name in as_list(names)]
    ignored = [*([] if config.get("lm_head") else ["lm_head"]), *(config.get("modules_to_not_convert") or [])]
    found: dict[str, GroupedWeight] = {}
    for name, linear in linears.items():
        if is_ignored(name, ignored) or (only and not any(name.endswith(f".{one}") for one in only)):
            continue
        settings = _overridden(config, name)
        if settings is None:
            continue
        found[f"{name}.weight"] = gptq_weight(
            name,
            linear,
            _bits(settings),
            integer(settings, "group_size", 128),
            stores_less=file_format == "gptq",
            act_order=bool(settings.get("desc_act", False)) and not settings.get("static_groups", False),
        )
    return found


def _overridden(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The settings of a module with GPTQModel's `dynamic` rules (regular expression → settings); None: it is not quantized."""
    for pattern, settings in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            if re.match(pattern[2:], name):
                return None
        elif re.match(pattern.removeprefix("+:"), name):
            return {**config, **settings}
    return config


def gptq_weight(name: str, linear: nn.Linear, bits: int, group_size: int, *, stores_less: bool, act_order: bool) -> GroupedWeight:
    """A linear in GPTQ's format: qweight int32 [I · bits / 32, O], qzeros int32 [G, O · bits / 32], scales float16 [G, O], g_idx int32 [I].

    stores_less: zero points are stored minus 1. act_order: the inputs of a group are not adjacent.
    """
    out_features, in_features = linear.weight.shape
    group_size, groups = _groups(name, in_features, group_size)
    _require_multiple(name, "inputs", in_features, 32)
    _require_multiple(name, "outputs", out_features, 32)
    order = ((f"{name}.g_idx", (in_features,), torch.int32),) if act_order and groups > 1 else ()
    return GroupedWeight(
        bits=bits,
        group_size=group_size,
        tensors=(
            (f"{name}.qweight", (in_features * bits // 32, out_features), torch.int32),
            (f"{name}.qzeros", (groups, out_features * bits // 32), torch.int32),
            (f"{name}.scales", (groups, out_features), torch.float16),
            *order,
        ),
        codes=("gptq_codes", f"{name}.qweight", bits, in_features),
        scale=("transposed", f"{name}.scales"),
        offset=("gptq_zeros", f"{name}.qzeros", bits, out_features, int(stores_less)),
        input_groups=f"{name}.g_idx" if order else None,
        unused=(f"{name}.g_idx",),
    )


def _auto_round(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, GroupedWeight]:
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    known = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq")
    require("packing_format", packing, known)
    blocks = as_list(config.get("block_name_to_quantize") or config.get("to_quant_block_names") or [])
    found: dict[str, GroupedWeight] = {}
    extra = config.get("extra_config") or {}
    for name, linear in linears.items():
        own = next((extra[key] for key in extra if key == name or _matches(key, name)), None)
        if own is None and (name == "lm_head" or (blocks and not any(name.startswith(f"{block}.") for block in blocks))):
            continue
        settings = {**config, **(own or {})}
        if settings.get("bits", 4) >= 16:
            continue
        if packing.endswith("auto_awq"):
            require("bits", settings.get("bits"), (4,))
            found[f"{name}.weight"] = awq_weight(name, linear, integer(settings, "group_size", 128))
        else:
            found[f"{name}.weight"] = gptq_weight(
                name, linear, _bits(settings), integer(settings, "group_size", 128), stores_less=True, act_order=False
            )
    return found


def pack_quantized(
    name: str, linear: nn.Linear, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, model_dtype: Any
) -> GroupedWeight:
    """A linear in compressed-tensors' pack-quantized format. weights, inputs: the group's. model_dtype: the config's, which scales have."""
    bits: int = weights.get("num_bits", 0)
    require("config_groups.weights.num_bits", bits, (4, 8))
    require("config_groups.weights.type", weights.get("type", "int"), ("int",))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    require("config_groups.weights.strategy", strategy, ("group", "channel"))
    actorder = weights.get("actorder")
    require("config_groups.weights.actorder", actorder, (None, False, "weight", "static", "group", "dynamic"))
    out_features, in_features = linear.weight.shape
    size = -1 if strategy == "channel" else integer(weights, "group_size", 128)
    group_size, groups = _groups(name, in_features, size)
    words, is_symmetric = -(-in_features * bits // 32), weights.get("symmetric", True)
    has_order = actorder in ("group", "dynamic") and groups > 1
    tensors: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        (f"{name}.weight_packed", (out_features, words), torch.int32),
        (f"{name}.weight_scale", (out_features, groups), _DTYPES.get(str(model_dtype), torch.float32)),
    ]
    if not is_symmetric:
        tensors.append((f"{name}.weight_zero_point", (-(-out_features * bits // 32), groups), torch.int32))
    if has_order:
        tensors.append((f"{name}.weight_g_idx", (in_features,), torch.int32))
    zeros = ("packed_columns", f"{name}.weight_zero_point", bits, out_features)
    return GroupedWeight(
        bits=bits,
        group_size=group_size,
        tensors=tuple(tensors),
        codes=("packed_rows", f"{name}.weight_packed", bits, in_features),
        scale=f"{name}.weight_scale",
        offset=None if is_symmetric else zeros,
        input_groups=f"{name}.weight_g_idx" if has_order else None,
        activations=None if inputs is None else _activations(inputs),
        unused=(f"{name}.weight_shape", f"{name}.weight_g_idx", f"{name}.weight_zero_point"),
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


def _groups(name: str, in_features: int, group_size: int) -> tuple[int, int]:
    """(inputs per group, groups); a group_size of −1 is one group per output."""
    if group_size == -1 or group_size >= in_features:
        return -(-in_features // _WHOLE) * _WHOLE, 1
    if group_size <= 0 or group_size % _KERNEL_GROUP:
        raise ModelConfigError(f"quantization_config's group_size is {group_size}: expected -1 or a multiple of {_KERNEL_GROUP}.")
    if in_features % group_size:
        raise ModelConfigError(
            f"quantization_config's group_size is {group_size}, which does not divide the {in_features} inputs of {name}."
        )
    return group_size, in_features // group_size


def _bits(settings: Mapping[str, Any]) -> int:
    require("bits", settings.get("bits"), (2, 3, 4, 8))
    return settings["bits"]


def _require_multiple(name: str, what: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise ModelConfigError(f"{name} has {size} {what}, but its packed format needs a multiple of {multiple}.")


def _matches(pattern: str, name: str) -> bool:
    """Whether a key of extra_config is a regular expression for the module."""
    return any(character in pattern for character in "*+[(\\") and re.fullmatch(pattern, name) is not None

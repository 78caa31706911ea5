"""bitsandbytes: NF4 and FP4 codes in blocks of 64, with or without double quantization; LLM.int8's weights, one scale per output.

Experts are read as linears, each under its own name.

Activations are not rounded to 8 bits, other than in LLM.int8. Shape legend: I input features, O output features, G groups of inputs.
Source: bitsandbytes' `functional.py` (`dequantize_4bit`, `QuantState`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.stored_weight import (
    GroupedParts,
    QuantizedWeight,
    StoredTensor,
    TensorPart,
    around,
    scale_to_rows,
    scaled_weight,
)
from compile_and_serve.custom_ops.weight_functions import Expression, weight_function
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, linears_of, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import is_ignored, require, tell_once
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.quantization.groups import require_whole_groups, scales_tensor
from compile_and_serve.models.spec import ModelSpec

_BLOCK = 64
_NESTED_BLOCK = 256  # blocks that share a nested scale
_STATE_BYTES = 1024  # the JSON text of a QuantState is padded to this length with spaces


@register_checkpoint_format(
    "bitsandbytes",
    fields=FormatFields(
        read="load_in_4bit load_in_8bit llm_int8_skip_modules bnb_4bit_quant_type bnb_4bit_quant_storage bnb_4bit_use_double_quant",
        # Weights of 8 bits are multiplied with unquantized activations, so there are no outliers to treat otherwise.
        no_effect="llm_int8_threshold llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight bnb_4bit_compute_dtype "
        "_load_in_4bit _load_in_8bit",
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    in_4_bits, in_8_bits = config.get("load_in_4bit", False), config.get("load_in_8bit", False)
    if in_4_bits is in_8_bits:
        raise ModelConfigError("quantization_config needs one of load_in_4bit and load_in_8bit to be true.")
    skipped = config.get("llm_int8_skip_modules")
    skipped = ["lm_head"] if skipped is None else skipped
    if in_8_bits:
        tell_once("LLM.int8 weights are multiplied with unquantized activations here, so that outliers need no second product.")
        kept = {name: linear for name, linear in linears_of(spec).items() if not is_ignored(name, skipped)}
        return {f"{name}.weight": _8bit_weight(name, linear) for name, linear in kept.items()} | _8bit_experts(spec, skipped)
    kind = config.get("bnb_4bit_quant_type", "fp4")
    require("bnb_4bit_quant_type", kind, ("nf4", "fp4"))
    storage = config.get("bnb_4bit_quant_storage", "uint8")
    require("bnb_4bit_quant_storage", storage, ("uint8",))
    is_double = config.get("bnb_4bit_use_double_quant", False)
    kept = {name: linear for name, linear in matrices_of(spec).items() if not is_ignored(name, skipped)}
    return {f"{name}.weight": _4bit_weight(name, linear, kind, is_double) for name, linear in kept.items()}


def _4bit_weight(name: str, linear: nn.Linear, kind: str, is_double: bool) -> QuantizedWeight:
    out_features, in_features = linear.weight.shape
    require_whole_groups(name, in_features, _BLOCK, "bitsandbytes")
    weight, blocks = f"{name}.weight", out_features * in_features // _BLOCK
    state = f"{weight}.quant_state.bitsandbytes__{kind}"
    packed = StoredTensor(name=weight, shape=(out_features * in_features // 2, 1), dtype=torch.uint8)
    if not is_double:
        scales = [scales_tensor(f"{weight}.absmax", (blocks,), torch.float32, 4, kind)]
        maxima: Expression = ("block_maxima", f"{weight}.absmax", out_features)
    else:
        nested = scales_tensor(f"{weight}.nested_absmax", (-(-blocks // _NESTED_BLOCK),), torch.float32, 4, kind)
        scales = [
            StoredTensor(name=f"{weight}.absmax", shape=(blocks,), dtype=torch.uint8),
            StoredTensor(name=f"{weight}.nested_quant_map", shape=(256,), dtype=torch.float32, fill=around(lambda std: 1.0)),
            replace(nested, weight_power=0),  # the offset of QuantState would have to follow
            StoredTensor(name=state, shape=(_STATE_BYTES,), dtype=torch.uint8, fill=_example_state, padding=ord(" ")),
        ]
        maxima = ("nested_maxima", *(tensor.name for tensor in scales), out_features)
    codes = ("high_nibble_first", weight, out_features, in_features)
    parts = GroupedParts(bits=4, group_size=_BLOCK, codes=codes, scale=maxima, table=kind)
    if is_double:  # the file has fewer bits a scale than float32
        parts = replace(parts, scale=("halves", maxima), scale_factor=("row_maxima", maxima), plain_scale=maxima)
    return QuantizedWeight(parts=parts, tensors=(packed, *scales), unused=(f"{weight}.quant_map", state))


def _8bit_weight(name: str, linear: nn.Linear) -> QuantizedWeight:
    return scaled_weight(
        f"{name}.weight",
        linear.weight.shape,
        torch.int8,
        scale=f"{name}.SCB",
        scale_of="row",
        scale_function="scb_to_rows",
        scale_divisor=127,
        unused=(f"{name}.weight_format",),
    )


def _8bit_experts(spec: ModelSpec, skipped: Sequence[str]) -> dict[str, QuantizedWeight]:
    """Stacked weights [X, O, I]. Raises `ModelConfigError` where only some of an expert's matrices are quantized."""
    parameters = dict(spec.module.named_parameters())
    stacks: dict[str, dict[str, TensorPart]] = {}
    for name, part in spec.parts.items():
        if parameters[part.parameter].dim() == 3:
            stacks.setdefault(part.parameter, {})[name.removesuffix(".weight")] = part
    found: dict[str, QuantizedWeight] = {}
    for parameter, parts in stacks.items():
        ignored = [is_ignored(name, skipped) for name in parts]
        if any(ignored) and not all(ignored):
            raise ModelConfigError(f"The checkpoint quantizes only some of the experts' matrices of {parameter}: expected all or none.")
        if not any(ignored):
            scale = f"{parameter}_SCB"
            found[parameter] = scaled_weight(
                parameter,
                parameters[parameter].shape,
                torch.int8,
                scale=scale,
                scale_of="row",
                scale_function="scb_to_rows",
                scale_divisor=127,
                scale_parts={f"{name}.SCB": part.of_scales(scale, 1) for name, part in parts.items()},
                unused=tuple(f"{name}.weight_format" for name in parts),
            )
    return found


def _example_state(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
    text = b'{"nested_offset": 0.0}'.ljust(_STATE_BYTES)  # of experts, one for each matrix
    return tensor.view(-1, _STATE_BYTES).copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))


@weight_function("scb_to_rows")
def scb_to_rows(largest_O: torch.Tensor, quantized_OI: torch.Tensor) -> torch.Tensor:
    """SCB, the largest magnitude of each row, as the scale of int8 values up to 127. → float32 [O]"""
    return scale_to_rows(largest_O, quantized_OI) / 127


@weight_function("high_nibble_first")
def high_nibble_first(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """bitsandbytes: two codes in a byte, the first in the higher bits. uint8 [O · I / 2, 1] → [O, I]"""
    return torch.stack((packed >> 4, packed & 15), 1).reshape(out_features, in_features)


@weight_function("block_maxima")
def block_maxima(absmax: torch.Tensor, out_features: int) -> torch.Tensor:
    """bitsandbytes' `absmax` of blocks of 64, float32 [O · G] → [O, G]"""
    return absmax.reshape(out_features, -1)


@weight_function("nested_maxima")
def nested_maxima(
    absmax: torch.Tensor, quant_map: torch.Tensor, nested_absmax: torch.Tensor, state: torch.Tensor, out_features: int
) -> torch.Tensor:
    """bitsandbytes' double quantization: quant_map[absmax] · nested_absmax + offset, with a nested scale for 256 blocks.

    absmax: uint8 [O · G]; quant_map: float32 [256]; nested_absmax: float32 [ceil(O · G / 256)]; state: uint8, the JSON text of the
    QuantState, which has the offset. → float32 [O, G] (float64 of float64)
    """
    is_real = type(state) is torch.Tensor  # not a tensor without data, of which only the shape is asked
    offset = _read_state(state)["nested_offset"] if is_real else 0.0
    scale = nested_absmax.repeat_interleave(_NESTED_BLOCK)[: absmax.numel()]
    return (quant_map[absmax.to(torch.int32)] * scale + offset).reshape(out_features, -1)


@weight_function("row_maxima")
def row_maxima(scale_OG: torch.Tensor) -> torch.Tensor:
    """The largest scale of each row. → [O, 1]"""
    return scale_OG.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


@weight_function("halves")
def halves(scale_OG: torch.Tensor) -> torch.Tensor:
    """Scales in float16, to be multiplied by `row_maxima`. → float16 [O, G] (float64 of float64)"""
    scaled = scale_OG / row_maxima(scale_OG)
    return scaled if scale_OG.dtype == torch.float64 else scaled.half()


def _read_state(state: torch.Tensor) -> dict[str, float]:
    """The QuantState of a 4-bit weight. Raises `ValueError` if it is none, or if its offset is missing."""
    try:
        found = json.loads(bytes(state.cpu().tolist()))
        found["nested_offset"] = float(found["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"A quant_state of the checkpoint has no nested_offset ({type(error).__name__}: {error}): use the complete weights, or "
            "bnb_4bit_use_double_quant as they were quantized."
        ) from None
    return found

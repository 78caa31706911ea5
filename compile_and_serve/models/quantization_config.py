"""Reads a config.json's `quantization_config`: which linears the checkpoint stores quantized, and how.

Supported are the formats that the kernels run without conversion:
- `compressed-tensors` (llm-compressor): formats float-quantized, int-quantized and naive-quantized with 8 bits; pack-quantized with 4 or
  8 bits, per group or channel, symmetric or not; of experts: `models/expert_formats.py`;
- Hugging Face's `fp8`: blocks of 128 × 128 with `weight_scale_inv` (DeepSeek, Qwen3), or one `weight_scale` per tensor;
- `awq`, `gptq` and `auto-round`: `models/grouped_config.py`;
- NVFP4, MXFP4, bitsandbytes, ModelOpt and Quark: `models/float4_config.py`;
- torchao: `models/torchao_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.quantization import BLOCK, Activations, QuantizedWeight, StoredWeight
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.expert_formats import ExpertFormats
from compile_and_serve.models.float4_config import (
    MXFP4_FORMAT,
    NVFP4_FORMAT,
    bitsandbytes_weights,
    modelopt_weights,
    packed_float4,
    quark_weights,
)
from compile_and_serve.models.grouped_config import PACKED_FORMAT, gguf_weights, grouped_weights, pack_quantized
from compile_and_serve.models.spec import ModelSpec, TensorPart
from compile_and_serve.models.torchao_config import renamed_weights, torchao_weights

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_ALL_FORMATS = (*_FORMATS, PACKED_FORMAT, NVFP4_FORMAT, MXFP4_FORMAT)
_ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts; they stay unquantized
_DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """What a `quantization_config` says of a checkpoint.

    quantized: parameter name → how the checkpoint stores it, for the linears and experts that are quantized. parts: of stacked tensors of
    quantized experts, as in `ModelSpec`. unused: names of tensors that the checkpoint may have besides. weight_map: as in `ModelSpec`.
    """

    quantized: Mapping[str, StoredWeight] = field(default_factory=dict)
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    unused: Sequence[str] = ()
    weight_map: Mapping[str, str] = field(default_factory=dict)


def stored_weights(config: Mapping[str, Any], module: nn.Module, parts: Mapping[str, TensorPart] | None = None) -> StoredWeights:
    """What `quantization_config` says of the linears and experts of a model.

    module: the model on the meta device. parts: of its stacked weights. Raises `ModelConfigError` for an unsupported method or scheme.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return StoredWeights()
    if not isinstance(quantization, dict):
        raise ModelConfigError(f"quantization_config must be a JSON object, got a {type(quantization).__name__}.")
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        experts = ExpertFormats(module, parts or {})
        dtype = config.get("torch_dtype") or config.get("dtype")
        linears = _compressed_tensors(quantization, _linears(module), experts, dtype)
        return StoredWeights(quantized=linears | experts.quantized, parts=experts.parts, unused=experts.unused)
    if method == "fp8":
        quantized = _fp8(quantization, _linears(module)) | _fp8_experts(quantization, module)
        return StoredWeights(quantized=quantized, parts=expert_scale_parts(parts or {}, quantized))
    if method in ("modelopt", "modelopt_fp4"):
        return StoredWeights(quantized=modelopt_weights(quantization, _linears(module)))
    if method == "quark":
        return StoredWeights(quantized=quark_weights(quantization, _linears(module)))
    if method == "bitsandbytes":
        return StoredWeights(quantized=bitsandbytes_weights(quantization, _linears(module)))
    if method == "torchao":
        weights = torchao_weights(quantization, _linears(module))
        return StoredWeights(quantized=weights, weight_map=renamed_weights(weights))
    if method == "gguf":
        return StoredWeights(quantized=gguf_weights(quantization, module))
    if (grouped := grouped_weights(quantization, _linears(module))) is not None:
        return StoredWeights(quantized=grouped)
    raise ModelConfigError(
        f"quantization_config's quant_method {method!r} is not supported: use a checkpoint in the format compressed-tensors, fp8, awq, "
        "gptq, auto-round, bitsandbytes, modelopt, quark or torchao, or an unquantized one with --quantization."
    )


def with_stored_weights(spec: ModelSpec) -> ModelSpec:
    """The spec with what its config's `quantization_config` says. Raises `ModelConfigError` as `stored_weights` does."""
    stored = stored_weights(spec.config, spec.module, spec.parts)
    return replace(
        spec,
        quantized_weights=stored.quantized,
        parts={**spec.parts, **stored.parts},
        weight_map={**spec.weight_map, **stored.weight_map, **dict.fromkeys(stored.unused)},
    )


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Linears by name, without an output head that shares its weight with the embedding: no format quantizes it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and names[id(child.weight)] == f"{name}.weight"
    }


def _compressed_tensors(
    config: Mapping[str, Any], linears: Mapping[str, nn.Linear], experts: ExpertFormats, model_dtype: Any
) -> dict[str, StoredWeight]:
    found: dict[str, StoredWeight] = {}
    ignored = config.get("ignore") or []
    for group in (config.get("config_groups") or {}).values():
        targets = group.get("targets") or []
        chosen = {name: one for name, one in linears.items() if _is_covered(targets, ignored, name)}
        if group.get("weights") is None and not chosen:  # attention: `cache_scales.py` reads its `kv_cache_scheme`
            continue
        file_format = group.get("format") or config.get("format")
        if file_format not in _ALL_FORMATS:
            raise ModelConfigError(
                f"The checkpoint's compressed-tensors format {file_format!r} is not supported: expected one of {', '.join(_ALL_FORMATS)}."
            )
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        experts.add_group(group, file_format, model_dtype, _scheme, partial(_is_covered, targets, ignored))
        if file_format in (NVFP4_FORMAT, MXFP4_FORMAT):
            for name, linear in chosen.items():
                found[f"{name}.weight"] = packed_float4(name, linear, file_format, weights, inputs)
            continue
        if file_format == PACKED_FORMAT:
            for name, linear in chosen.items():
                found[f"{name}.weight"] = pack_quantized(name, linear, weights, inputs, model_dtype)
            continue
        dtype, activations, strategy = _scheme(weights, inputs)
        for name, linear in chosen.items():
            out_features, in_features = linear.weight.shape
            shapes = {"tensor": (1,), "channel": (out_features, 1), "block": _num_blocks(out_features, in_features)}
            found[f"{name}.weight"] = QuantizedWeight(
                dtype=dtype,
                scale=f"{name}.weight_scale",
                scale_shape=shapes[strategy],
                per_block=strategy == "block",
                activations=activations,
                input_scale=f"{name}.input_scale" if activations == "static" else None,
            )
    return found


def _scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> tuple[torch.dtype, Activations, str]:
    """(the weights' dtype, how activations are quantized, what a weight scale covers: tensor, channel or block)."""
    kind, strategy = weights.get("type"), weights.get("strategy")
    scheme = f"{weights.get('num_bits')}-bit {kind} weights per {strategy}"
    if weights.get("num_bits") != 8 or kind not in _DTYPES or not weights.get("symmetric", True):
        raise _unsupported(scheme, "symmetric 8-bit weights")
    if strategy not in ("tensor", "channel", "block"):
        raise _unsupported(scheme, "scales per tensor, channel or block")
    if strategy == "block" and list(weights.get("block_structure") or []) != [BLOCK, BLOCK]:
        raise _unsupported(f"{scheme} of {weights.get('block_structure')}", f"blocks of [{BLOCK}, {BLOCK}]")
    if inputs is None:
        return _DTYPES[kind], "none", strategy
    scheme = f"{inputs.get('num_bits')}-bit {inputs.get('type')} activations per {inputs.get('strategy')} over {scheme}"
    if inputs.get("num_bits") != 8 or inputs.get("type") != kind or not inputs.get("symmetric", True):
        raise _unsupported(scheme, "symmetric activations of the weights' type")
    expected = "group" if strategy == "block" else "token" if inputs.get("dynamic") else "tensor"
    if inputs.get("strategy") != expected or (expected == "group" and inputs.get("group_size") not in (None, BLOCK)):
        raise _unsupported(scheme, "dynamic activations per token (with blocks: per group of 128) or static activations per tensor")
    return _DTYPES[kind], "dynamic" if inputs.get("dynamic") else "static", strategy


def _fp8(config: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, QuantizedWeight]:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"fp8 weights in {config['fmt']!r}", "'e4m3'")
    scheme, block = config.get("activation_scheme", "dynamic"), config.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise _unsupported(f"activation_scheme {scheme!r}", "'dynamic' or 'static'")
    if block is not None and (list(block) != [BLOCK, BLOCK] or scheme != "dynamic"):
        raise _unsupported(f"fp8 blocks of {block} with {scheme} activations", f"blocks of [{BLOCK}, {BLOCK}] with dynamic activations")
    ignored = ["lm_head", *(config.get("modules_to_not_convert") or config.get("ignored_layers") or [])]
    found: dict[str, QuantizedWeight] = {}
    for name, linear in linears.items():
        if name.rpartition(".")[2] in _ROUTERS:
            continue
        if any(f".{name}.".endswith(f".{other}.") or f"{name}.".startswith(f"{other}.") for other in ignored):
            continue
        found[f"{name}.weight"] = QuantizedWeight(
            dtype=torch.float8_e4m3fn,
            scale=f"{name}.{'weight_scale' if block is None else 'weight_scale_inv'}",
            scale_shape=(1,) if block is None else _num_blocks(*linear.weight.shape),
            per_block=block is not None,
            activations=scheme,
            input_scale=f"{name}.input_scale" if scheme == "static" else None,
        )
    return found


def _fp8_experts(config: Mapping[str, Any], module: nn.Module) -> dict[str, QuantizedWeight]:
    """Stacked weights of experts [X, O, I], whose scales are stacked, too; `expert_scale_parts` says how checkpoints name them."""
    found: dict[str, QuantizedWeight] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() != 3 or not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        num_experts, outputs, inputs = parameter.shape
        if config.get("weight_block_size") is None or (name.endswith("gate_up_proj") and outputs // 2 % BLOCK):
            raise _unsupported("fp8 experts without whole blocks of gate rows", f"blocks of [{BLOCK}, {BLOCK}]")
        found[name] = QuantizedWeight(
            dtype=torch.float8_e4m3fn,
            scale=f"{name}_scale_inv",
            scale_shape=(num_experts, *_num_blocks(outputs, inputs)),
            per_block=True,
            activations="dynamic",
        )
    return found


def expert_scale_parts(parts: Mapping[str, TensorPart], quantized: Mapping[str, StoredWeight]) -> dict[str, TensorPart]:
    """The scales of each expert's matrices, which are parts of the stacked scales as the matrices are of the stacked weights."""
    found: dict[str, TensorPart] = {}
    for name, part in parts.items():
        stored = quantized.get(part.parameter)
        if isinstance(stored, QuantizedWeight):
            found[f"{name}_scale_inv"] = TensorPart(
                parameter=stored.scale, index=part.index, first_row=part.first_row // BLOCK, num_rows=-(-part.num_rows // BLOCK)
            )
    return found


def _is_target(name: str, targets: Sequence[str]) -> bool:
    """compressed-tensors' rule: a target is a module's name, its class's name, or `re:` with a pattern for `re.match`."""
    return any(re.match(target[3:], name) is not None if target.startswith("re:") else target in (name, "Linear") for target in targets)


def _is_covered(targets: Sequence[str], ignored: Sequence[str], name: str) -> bool:
    return _is_target(name, targets) and not _is_target(name, ignored)


def _num_blocks(out_features: int, in_features: int) -> tuple[int, int]:
    return -(-out_features // BLOCK), -(-in_features // BLOCK)


def _unsupported(what: str, expected: str) -> ModelConfigError:
    return ModelConfigError(f"The checkpoint is quantized with {what}, which is not supported: expected {expected}.")

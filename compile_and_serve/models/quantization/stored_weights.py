"""What a config.json's `quantization_config` says of a checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.models.config import ModelConfigError

# These register themselves.
from compile_and_serve.models.quantization import (  # noqa: F401
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    modelopt,
    quark,
    torchao,
)
from compile_and_serve.models.quantization.checkpoint_format import CacheDtype, format_of, known_formats
from compile_and_serve.models.quantization.config_fields import is_ignored, is_pattern_for
from compile_and_serve.models.quantization.expert_stacks import with_stacked_experts
from compile_and_serve.models.spec import ModelSpec


def with_stored_weights(spec: ModelSpec, *, requantize: bool = False) -> ModelSpec:
    """The spec with what its config's `quantization_config` says.

    requantize: the model will be quantized to another format. Raises `ModelConfigError` for an unsupported format or scheme.
    """
    quantization = spec.config.get("quantization_config")
    if quantization is None:
        return spec
    if not isinstance(quantization, dict):
        raise ModelConfigError(f"quantization_config must be a JSON object, got a {type(quantization).__name__}.")
    checkpoint_format = format_of(quantization)
    if requantize and checkpoint_format.may_be_requantized:
        return spec
    try:
        if checkpoint_format.fields is not None:
            checkpoint_format.fields.check(quantization)
        stored = with_stacked_experts(spec, checkpoint_format.read(_with_our_names(quantization, spec), spec))
    except (TypeError, AttributeError) as error:  # of a field whose type no reader expects
        raise ModelConfigError(f"quantization_config has a field of a wrong type ({error}): check the model's config.") from error
    parts = {name: part for one in stored.values() for tensor in one.tensors for name, part in tensor.stacked_from.items()}
    others = _checkpoint_names(spec, stored)
    encoder = spec.encoder
    if encoder is not None:  # it must know that the decoder's quantized tensors are not its own
        own = {name for name, _ in encoder.module.named_parameters()}
        unused = (name for one in stored.values() for name in one.unused)
        not_own = dict.fromkeys(name for name in (*others, *others.values(), *parts, *unused) if name not in own)
        encoder = replace(encoder, weight_map={**not_own, **encoder.weight_map})
    names = {**spec.weight_map, **others}
    return replace(spec, quantized_weights=stored, parts={**spec.parts, **parts}, weight_map=names, encoder=encoder)


# Fields of formats that name the modules that are not quantized.
_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


def _renamed_modules(spec: ModelSpec) -> list[tuple[str, str]]:
    """(the checkpoint's name, ours) of modules that have another name in checkpoints."""
    names = ((theirs, ours) for theirs, ours in spec.weight_map.items() if ours is not None)
    return [(a.removesuffix(".weight"), b.removesuffix(".weight")) for a, b in names if a.endswith(".weight") and b.endswith(".weight")]


def _with_our_names(quantization: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """What a checkpoint excludes under its own names is excluded under ours, too."""
    lists = {field: quantization[field] for field in _EXCLUSIONS if isinstance(quantization.get(field), list)}
    renamed = _renamed_modules(spec)
    ours = {
        field: [ours for theirs, ours in renamed if any(isinstance(one, str) and _names(one, theirs) for one in excluded)]
        for field, excluded in lists.items()
    }
    return quantization | {field: [*excluded, *ours[field]] for field, excluded in lists.items()}


def _names(excluded: str, module: str) -> bool:
    return is_ignored(module, [excluded]) or fnmatchcase(module, excluded) or is_pattern_for(excluded, module)


def _checkpoint_names(spec: ModelSpec, stored: Mapping[str, StoredWeight]) -> dict[str, str]:
    """Checkpoint tensor → ours, for the tensors of weights whose modules have other names in checkpoints."""
    modules: dict[str, list[str]] = {}
    for theirs, ours in _renamed_modules(spec):
        modules.setdefault(ours, []).append(theirs)
    tensors = [name for one in stored.values() for name in (*(tensor.name for tensor in one.tensors), *one.unused)]
    return {
        f"{theirs}.{leaf}": name for name in tensors for module, _, leaf in [name.rpartition(".")] for theirs in modules.get(module, ())
    }


def checkpoint_cache_dtype(config: Mapping[str, Any]) -> CacheDtype | None:
    """The 8-bit dtype of the KV cache that a config.json says the checkpoint is made for; None: none."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in known_formats():
        return None
    return known_formats()[quantization["quant_method"]].cache_dtype(quantization)

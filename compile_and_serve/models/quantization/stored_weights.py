"""What a config.json's `quantization_config` says of a checkpoint, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
        stored = with_stacked_experts(spec, checkpoint_format.read(quantization, spec))
    except (TypeError, AttributeError) as error:  # of a field whose type no reader expects
        raise ModelConfigError(f"quantization_config has a field of a wrong type ({error}): check the model's config.") from error
    parts = {name: part for one in stored.values() for tensor in one.tensors for name, part in tensor.stacked_from.items()}
    return replace(spec, quantized_weights=stored, parts={**spec.parts, **parts})


def checkpoint_cache_dtype(config: Mapping[str, Any]) -> CacheDtype | None:
    """The 8-bit dtype of the KV cache that a config.json says the checkpoint is made for; None: none."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in known_formats():
        return None
    return known_formats()[quantization["quant_method"]].cache_dtype(quantization)

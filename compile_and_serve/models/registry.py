"""Builds a `ModelSpec` from a checkpoint's config.json: by its family, or through the class of the transformers package."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from compile_and_serve.models.architecture import architecture_of, generating_architecture, with_architecture
from compile_and_serve.models.config import ModelConfigError, UnsupportedConfigError
from compile_and_serve.models.config_fields import check_fields
from compile_and_serve.models.families import known_families
from compile_and_serve.models.quantization.stored_weights import with_stored_weights
from compile_and_serve.models.spec import ModelSpec

log = logging.getLogger(__name__)

ModelImpl = Literal["auto", "transformers"]


def build_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    model_impl: ModelImpl = "auto",
    requantize: bool = False,
    code_folder: Path | None = None,
) -> ModelSpec:
    """Build the module of a config.json on the meta device, with its parameters in `dtype`.

    requantize: a .gguf file's blocks are dequantized, because the model will be quantized to another format.
    code_folder: the model's folder if its own classes (`auto_map`) may run; they do where no family is used.
    model_impl: "transformers" uses the transformers package's class; "auto" does so only for an architecture or a config without a family.
    Raises `ModelConfigError` for a config without an architecture, an unsupported architecture, invalid sizes, or an
    unsupported quantization.
    """
    config = with_architecture(config)
    name = generating_architecture(config)
    family = known_families().get(name)
    config["architectures"] = [name]
    if family is None or model_impl == "transformers":
        spec = _build_with_transformers(config, dtype, code_folder)
    else:
        try:
            if family.fields is not None:
                check_fields(config, family.fields, name)
            spec = family.build(config, dtype)
        except UnsupportedConfigError as reason:
            spec = _build_unsupported(config, dtype, reason, code_folder)
    return spec if spec.quantized_weights else with_stored_weights(spec, requantize=requantize)


def _build_unsupported(
    config: Mapping[str, Any], dtype: torch.dtype, reason: UnsupportedConfigError, code_folder: Path | None
) -> ModelSpec:
    """transformers' class for a config that the family refuses. Raises the reason if there is none."""
    try:
        spec = _build_with_transformers(config, dtype, code_folder)
    except ModelConfigError:
        raise reason from None
    log.info("The native %s is not used: %s", architecture_of(config), reason)
    return spec


def _build_with_transformers(config: Mapping[str, Any], dtype: torch.dtype, code_folder: Path | None) -> ModelSpec:
    # Imported here because importing transformers takes seconds.
    from compile_and_serve.models.transformers.model import build

    spec = build(config, dtype, code_folder)
    log.info("%s runs in the transformers package's implementation.", architecture_of(config))
    return spec

"""Decoders that compute embeddings or class scores of prompts: a family's module with another output head.

The head is removed for embeddings, so that the output is the hidden states after the last norm. For a sequence classifier it is replaced by
the checkpoint's `score`. An encoder declares its `pooling` and outputs in a builder of its own (`register_model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.step import CLASS_LOGITS, HIDDEN_STATES, ROWS, StepOutput
from compile_and_serve.models.architecture import architecture_of, with_architecture
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.families import known_families
from compile_and_serve.models.families.gemma import GemmaForCausalLM
from compile_and_serve.models.pooling_spec import classifier_pooling
from compile_and_serve.models.registry import ModelImpl, build_model
from compile_and_serve.models.spec import ModelSpec, PoolingSpec

_GENERATES, _CLASSIFIES, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
_CLASSIFIES_TOKENS, _MASKED = "ForTokenClassification", "ForMaskedLM"
_OLDER_GENERATES = "LMHead"  # of GPT2LMHeadModel or XLMWithLMHeadModel, which end like a decoder without a head


def is_pooling_architecture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a class that cannot generate: a classifier, a masked LM, or a model without an output head."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return False
    name = str(names[0])
    return name.endswith((_CLASSIFIES, _CLASSIFIES_TOKENS, _MASKED, _BARE)) and _OLDER_GENERATES not in name


def build_pooling_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    model_impl: ModelImpl = "auto",
    requantize: bool = False,
    code_folder: Path | None = None,
) -> ModelSpec:
    """`build_model` for embeddings or classification. Raises `ModelConfigError` as that does.

    A family whose spec has `pooling` is left as it is.
    """
    config = with_architecture(config)
    architecture = architecture_of(config)
    family, is_classifier = architecture, architecture.endswith(_CLASSIFIES)
    if architecture in known_families():
        pass
    elif is_classifier:
        family = architecture.removesuffix(_CLASSIFIES) + _GENERATES
    elif architecture.endswith(_BARE):
        family = architecture.removesuffix(_BARE) + _GENERATES
    if model_impl == "transformers" or family not in known_families():
        raise _refused(architecture)
    named = {**config, "architectures": [family]}
    spec = build_model(named, dtype=dtype, model_impl=model_impl, requantize=requantize, code_folder=code_folder)
    if spec.pooling is not None:
        return spec
    old_head = getattr(spec.module, "lm_head", None)
    if not isinstance(old_head, nn.Linear):
        raise _refused(architecture)
    hidden_size = old_head.in_features
    names: dict[str, str | None] = {"lm_head.weight": None}
    if is_classifier:
        pooling = classifier_pooling(config)
        head: nn.Module = nn.Linear(hidden_size, pooling.width, bias=False, dtype=dtype, device="meta")
        head.requires_grad_(False)
        names["score.weight"] = "lm_head.weight"
    else:
        pooling, head = PoolingSpec(kind="embed", width=hidden_size), nn.Identity()
    spec.module.lm_head = head
    if isinstance(spec.module, GemmaForCausalLM):
        spec.module.cap = 0.0  # it belongs to logits of tokens
    if architecture.endswith(_BARE):
        parameters = [name for name, _ in spec.module.named_parameters()]
        parts = list(spec.parts)
        names |= {name.removeprefix("model."): name for name in (*parameters, *parts) if name.startswith("model.")}
    name = CLASS_LOGITS if is_classifier else HIDDEN_STATES
    return replace(
        spec,
        config=config,
        weight_map={**spec.weight_map, **names},
        tp_plan={module: style for module, style in spec.tp_plan.items() if module != "lm_head"},
        outputs=(StepOutput(name=name, dims=(ROWS, pooling.width)),),
        pooling=pooling,
    )


def _refused(architecture: str) -> ModelConfigError:
    return ModelConfigError(
        f"{architecture} cannot compute embeddings or classes: only models with a native implementation can "
        f"({', '.join(sorted(known_families()))}, and the same families' {_CLASSIFIES} and {_BARE})."
    )

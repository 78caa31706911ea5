"""Decoders that compute embeddings or class scores of prompts: a family's module with another output head.

The head is removed for embeddings, so that the output is the hidden states after the last norm. For a sequence classifier it is replaced by
the checkpoint's `score`. An encoder declares its `pooling` and outputs in a builder of its own (`register_model`). Without a family, the
class of the transformers package pools (`models/transformers/pooling.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.step import CLASS_LOGITS, HIDDEN_STATES, ROWS, StepOutput
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.architecture import architecture_of, with_architecture
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.families import known_families
from compile_and_serve.models.families.gemma import GemmaForCausalLM
from compile_and_serve.models.pooling_spec import classifier_pooling
from compile_and_serve.models.quantization.stored_weights import with_stored_weights
from compile_and_serve.models.registry import ModelImpl, build_model
from compile_and_serve.models.spec import ModelSpec, PoolingSpec

log = logging.getLogger(__name__)

_GENERATES, _CLASSIFIES, _BARE = "ForCausalLM", "ForSequenceClassification", "Model"
_CLASSIFIES_TOKENS, _MASKED, _LATE = "ForTokenClassification", "ForMaskedLM", "ColBERT"
_REWARDS = {"ForRewardModel": 1, "ForProcessRewardModel": 2}  # the classes of each token
_OLDER_GENERATES = "LMHead"  # of GPT2LMHeadModel or XLMWithLMHeadModel, which end like a decoder without a head


def is_pooling_architecture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names a class that cannot generate: a classifier, a masked LM, or a model without an output head."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        return False
    name = str(names[0])
    return name.endswith((_CLASSIFIES, _CLASSIFIES_TOKENS, _MASKED, _LATE, _BARE, *_REWARDS)) and _OLDER_GENERATES not in name


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
    reward = next((suffix for suffix in _REWARDS if architecture.endswith(suffix)), None)
    if architecture in known_families():
        pass
    elif reward is not None:
        family = architecture.removesuffix(reward) + _GENERATES
    elif is_classifier:
        family = architecture.removesuffix(_CLASSIFIES) + _GENERATES
    elif architecture.endswith(_BARE):
        family = architecture.removesuffix(_BARE) + _GENERATES
    if model_impl == "transformers" or family not in known_families():
        # Imported here because importing transformers takes seconds.
        from compile_and_serve.models.transformers.pooling import build_pooled

        spec = build_pooled(config, dtype, code_folder)
        log.info("%s runs in the transformers package's implementation.", architecture)
        return with_stored_weights(spec, requantize=requantize)
    named = {**config, "architectures": [family]}
    spec = build_model(named, dtype=dtype, model_impl=model_impl, requantize=requantize, code_folder=code_folder)
    if spec.pooling is not None:
        return spec
    old_head = getattr(spec.module, "lm_head", None)
    if not isinstance(old_head, nn.Linear):
        raise _refused(architecture)
    hidden_size = old_head.in_features
    names: dict[str, str | None] = {"lm_head.weight": None}
    head: nn.Module
    stored: dict[str, StoredWeight] = {}
    answers = config.get("classifier_token_ids")
    if answers is not None:
        pooling = PoolingSpec(kind="classify", width=1, activation="sigmoid")
        head = nn.Linear(hidden_size, 1, bias=False, dtype=dtype, device="meta")
        stored["lm_head.weight"] = _answers_weight(spec, old_head, answers, dtype)
        names = {}
    elif reward is not None:
        width = _REWARDS[reward]
        pooling = PoolingSpec(kind="classify", width=width, pooling="all", activation="none" if width == 1 else "softmax")
        linears = [nn.Linear(hidden_size, size, dtype=dtype, device="meta") for size in (hidden_size, width)]
        head = nn.Sequential(linears[0], nn.ReLU(), linears[1])
        names |= {f"score.{i}.{leaf}": f"lm_head.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")}
    elif is_classifier:
        pooling = classifier_pooling(config)
        head = nn.Linear(hidden_size, pooling.width, bias=False, dtype=dtype, device="meta")
        names["score.weight"] = "lm_head.weight"
    else:
        pooling, head = PoolingSpec(kind="embed", width=hidden_size), nn.Identity()
    spec.module.lm_head = head.requires_grad_(False)
    if isinstance(spec.module, GemmaForCausalLM):
        spec.module.cap = 0.0  # it belongs to logits of tokens
    if architecture.endswith(_BARE):
        parameters = [name for name, _ in spec.module.named_parameters()]
        parts = list(spec.parts)
        names |= {name.removeprefix("model."): name for name in (*parameters, *parts) if name.startswith("model.")}
    name = CLASS_LOGITS if pooling.kind == "classify" else HIDDEN_STATES
    return replace(
        spec,
        config=config,
        weight_map={**spec.weight_map, **names},
        tp_plan={module: style for module, style in spec.tp_plan.items() if module != "lm_head"},
        outputs=(StepOutput(name=name, dims=(ROWS, pooling.width)),),
        pooling=pooling,
        quantized_weights={**spec.quantized_weights, **stored},
    )


@weight_function("row_or_difference")
def row_or_difference(weight_VD: torch.Tensor, row: int, less: int | None) -> torch.Tensor:
    """A row of the output head, less another. → [1, D]"""
    one_D = weight_VD[row]
    return (one_D if less is None else (one_D.float() - weight_VD[less].float()).to(one_D.dtype))[None].contiguous()


def _answers_weight(spec: ModelSpec, head: nn.Linear, answers: Sequence[int], dtype: torch.dtype) -> ArrangedWeight:
    """What the positive answer's logit has more than the negative one's, as the weight of a single class."""
    if spec.quantized_weights:
        raise ModelConfigError("A reranker that is a decoder cannot be a quantized checkpoint: use one in 16 or 32 bits.")
    if max(answers) >= head.out_features:
        raise ModelConfigError(f"The answer {max(answers)} is not an id of the model, whose ids are 0 to {head.out_features - 1}.")
    embedding = next((name for name, one in spec.module.named_parameters() if one is head.weight), "lm_head.weight")
    tensor = StoredTensor(name=embedding, shape=tuple(head.weight.shape), dtype=dtype)
    return ArrangedWeight(value=("row_or_difference", embedding, answers[-1], answers[0] if len(answers) > 1 else None), tensors=(tensor,))


def _refused(architecture: str) -> ModelConfigError:
    return ModelConfigError(
        f"{architecture} cannot compute embeddings or classes: only models with a native implementation can "
        f"({', '.join(sorted(known_families()))}, and the same families' {_CLASSIFIES} and {_BARE})."
    )

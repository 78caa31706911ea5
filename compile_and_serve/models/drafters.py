"""Models that draft tokens for another model, the target: what their steps take, and how the drafts come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compile_and_serve.custom_ops.step import INPUT_IDS, POSITIONS
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import ModelImpl, build_model
from compile_and_serve.models.spec import ModelSpec

DrafterKind = Literal["tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """A model that drafts.

    kind: "tokens" reads tokens alone: it is a decoder of its own.
    target: the target's spec, which gives the outputs that the drafter reads.
    """

    kind: DrafterKind
    spec: ModelSpec
    target: ModelSpec


def draft_model(
    config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype, model_impl: ModelImpl = "auto"
) -> DrafterSpec:
    """A decoder of the target's vocabulary. Raises `ModelConfigError` with one sentence where it does not fit."""
    spec = build_model(config, dtype=dtype, model_impl=model_impl)
    if spec.pooling is not None or spec.drafter is not None:
        raise ModelConfigError("The draft model must be a plain decoder: choose another one in speculative_config.")
    if spec.vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"The draft model has a vocabulary of {spec.vocab_size} tokens and the model one of {target.vocab_size}: choose a draft "
            "model with the same tokenizer."
        )
    check_state(spec)
    check_inputs(spec, target)
    return DrafterSpec(kind="tokens", spec=spec, target=target)


def check_state(spec: ModelSpec) -> None:
    """Raise `ModelConfigError` for a drafter whose state cannot follow the target's blocks."""
    recurrent = ", ".join(group.name for group in spec.state if not group.is_attention)
    if recurrent:
        raise ModelConfigError(
            f"The drafter keeps recurrent state ({recurrent}), from which rejected tokens cannot be removed: choose another one."
        )


def check_inputs(spec: ModelSpec, target: ModelSpec) -> None:
    """Raise `ModelConfigError` if a drafter takes other inputs than a plain decoder, or the target's steps lack them."""
    given = {one.name: (one.dtype, one.dims) for one in target.inputs}
    for one in (INPUT_IDS, POSITIONS):
        if given.get(one.name) != (one.dtype, one.dims):
            raise ModelConfigError(f"The model's steps have no {one.name} of one row, which a drafter reads.")
    others = [one.name for one in spec.inputs if one.name not in (INPUT_IDS.name, POSITIONS.name, "logits_indices")]
    if others:
        raise ModelConfigError(
            f"The draft model takes {', '.join(others)} too, which no draft has: choose another one."
        )

"""A draft model: a smaller decoder with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compile_and_serve.custom_ops.step import DECODER_INPUTS
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec, check_vocabulary, checked_target
from compile_and_serve.models.registry import ModelImpl, build_model
from compile_and_serve.models.spec import ModelSpec


def draft_model(config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype, model_impl: ModelImpl = "auto") -> DrafterSpec:
    """A decoder of the target's vocabulary. Raises `ModelConfigError` with one sentence where it does not fit."""
    spec = build_model(config, dtype=dtype, model_impl=model_impl)
    if spec.pooling is not None:
        raise ModelConfigError("The draft model must be a plain decoder: choose another one in speculative_config.")
    check_vocabulary(spec.vocab_size, target)
    recurrent = ", ".join(group.name for group in spec.state if not group.is_attention)
    if recurrent:
        raise ModelConfigError(
            f"The draft model keeps recurrent state ({recurrent}), but drafters share the pages of the model's tokens, which have no "
            "room for it: choose a draft model of attention alone."
        )
    others = [one.name for one in spec.inputs if one not in DECODER_INPUTS]
    if others:
        raise ModelConfigError(f"The draft model takes {', '.join(others)} too, which no draft has: choose another one.")
    return DrafterSpec(spec=spec, target=checked_target(target), max_model_len=spec.max_model_len)

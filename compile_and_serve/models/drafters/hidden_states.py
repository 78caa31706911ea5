"""Hidden states: a second output of a target, and an input of the drafters that read them.

Shape legend: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from compile_and_serve.custom_ops.step import (
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    LOGITS_INDICES,
    POSITIONS,
    ROWS,
    TOKENS,
    StepInput,
    StepOutput,
)
from compile_and_serve.models.config import ModelConfigError, positive_int
from compile_and_serve.models.families.llama import LlamaForCausalLM
from compile_and_serve.models.spec import ModelSpec


def num_layers_of(spec: ModelSpec) -> int:
    """Layers of a decoder that can give its hidden states. Raises `ModelConfigError` for another one."""
    if not isinstance(spec.module, LlamaForCausalLM):
        name = (spec.config.get("architectures") or ["The model"])[0]
        raise ModelConfigError(
            f"{name} gives no hidden states to a drafter here: use the method draft_model, ngram or suffix, or a model of the families "
            "Llama, Qwen3, Mixtral, Qwen-MoE, OLMoE, DeepSeek or GLM-4-MoE."
        )
    return len(spec.module.model.layers)


def with_hidden_states(spec: ModelSpec, taps: tuple[int, ...]) -> ModelSpec:
    """The model with an output [T, D · taps]: the inputs of the layers of these numbers, side by side.

    The number of layers stands for the output of the last norm. The module is changed in place.
    """
    num_layers = num_layers_of(spec)
    assert isinstance(spec.module, LlamaForCausalLM)
    if not taps or not all(0 <= tap <= num_layers for tap in taps) or tuple(sorted(set(taps))) != taps:
        raise ModelConfigError(
            f"The drafter reads the hidden states of the layers {', '.join(map(str, taps))}, but the model has {num_layers} layers: use a "
            "drafter that was trained for this model."
        )
    spec.module.model.taps = taps
    size = spec.module.model.embed_tokens.embedding_dim
    return replace(
        spec,
        config={**spec.config, "hidden_state_taps": list(taps)},  # it is a part of what the module computes
        outputs=(*spec.outputs, StepOutput(name=HIDDEN_STATES, dims=(TOKENS, size * len(taps)))),
    )


def hidden_size_of(target: ModelSpec) -> int:
    num_layers_of(target)  # which names a target without hidden states
    return positive_int(target.config, "hidden_size")


def hidden_input(size: int, dtype: torch.dtype) -> StepInput:
    """Hidden states [T, D]. The host has none: it fills zeros."""
    return StepInput(
        name=HIDDEN_STATES, dtype=dtype, dims=(TOKENS, size), fill=lambda batch: np.zeros((len(batch.token_ids), size), dtype=np.float32)
    )


def reads_hidden_states(spec: ModelSpec, size: int, dtype: torch.dtype, gives: str = ROWS) -> ModelSpec:
    """The spec of a head, which takes and gives hidden states. Names in its checkpoint may lack "model.". gives: of which rows."""
    parameters = [name for name, _ in spec.module.named_parameters()]
    short = {name.removeprefix("model."): name for name in parameters if name.startswith("model.")}
    unused: dict[str, str | None] = dict.fromkeys(("d2t", "t2d", "fc.weight", "fc.bias"))
    return replace(
        spec,
        weight_map={**unused, **short, **spec.weight_map},
        inputs=(INPUT_IDS, POSITIONS, hidden_input(size, dtype), LOGITS_INDICES),
        outputs=(StepOutput(name=LOGITS), StepOutput(name=HIDDEN_STATES, dims=(gives, size))),
    )

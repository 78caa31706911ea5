"""Hidden states as a second output of a decoder, for drafters that read them."""

from __future__ import annotations

from dataclasses import replace

from compile_and_serve.custom_ops.step import HIDDEN_STATES, TOKENS, StepOutput
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.llama import LlamaForCausalLM
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

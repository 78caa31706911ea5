"""`DrafterSpec`: a model that drafts tokens for another model, the target; and what drafters ask of their target.

Shape legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from compile_and_serve.custom_ops import step
from compile_and_serve.custom_ops.step import StepInput, StepOutput
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # as targets call them


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """A model that drafts.

    target: the target's spec, which gives the hidden states that the drafter reads.
    hidden_size: of the hidden states that `spec` takes. combine: the target gives hidden states of several layers, and a linear
    fc [hidden_size, D · layers] makes one of them.
    maps_tokens: the drafter has a vocabulary of its own; draft token v is the target's token v + d2t[v].
    max_tokens: draft tokens that it can make; None: any number. max_model_len: the longest sequence of the target; None: any.
    borrowed_weights: parameter → names of the target's tensor that it takes if the drafter's checkpoint has none.
    prefix: of the names of the drafter's tensors in the checkpoint.
    later_layers: further layers for multi-token prediction. Each reads the hidden states of the one before.
    context: of a block drafter: writes the keys and values of the tokens before the block, from the target's hidden states.
    mask_token: of a block drafter.
    """

    spec: ModelSpec
    target: ModelSpec
    hidden_size: int = 0
    combine: bool = False
    maps_tokens: bool = False
    max_tokens: int | None = None
    max_model_len: int | None = None
    borrowed_weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prefix: str = ""
    later_layers: tuple[DrafterSpec, ...] = ()
    context: ModelSpec | None = None
    mask_token: int = 0


def check_vocabulary(vocab_size: int, target: ModelSpec) -> None:
    if vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"The drafter has a vocabulary of {vocab_size} tokens and the model one of {target.vocab_size}: choose a drafter with the "
            "same tokenizer."
        )


def checked_target(target: ModelSpec) -> ModelSpec:
    """The target, whose steps have what every drafter reads. Raises `ModelConfigError`."""
    given = {one.name: (one.dtype, one.dims) for one in target.inputs}
    for one in (step.INPUT_IDS, step.POSITIONS):
        if given.get(one.name) != (one.dtype, one.dims):
            raise ModelConfigError(f"The model's steps have no {one.name} of one row, which a drafter reads: remove speculative_config.")
    return target


def hidden_input(size: int, dtype: torch.dtype) -> StepInput:
    """Hidden states [T, D]."""
    return StepInput(name=step.HIDDEN_STATES, dtype=dtype, dims=(step.TOKENS, size), source="device")


def reads_hidden_states(spec: ModelSpec, size: int, dtype: torch.dtype, gives: str = step.ROWS) -> ModelSpec:
    """The spec of a head, which takes and gives hidden states. Names in its checkpoint may lack "model.". gives: of which rows."""
    parameters = [name for name, _ in spec.module.named_parameters()]
    short = {name.removeprefix("model."): name for name in parameters if name.startswith("model.")}
    unused: dict[str, str | None] = dict.fromkeys(("d2t", "t2d", "fc.weight", "fc.weight_scale", "fc.bias"))
    return replace(
        spec,
        weight_map={**unused, **short, **spec.weight_map},
        inputs=(step.INPUT_IDS, step.POSITIONS, hidden_input(size, dtype), step.LOGITS_INDICES),
        outputs=(StepOutput(name=step.LOGITS), StepOutput(name=step.HIDDEN_STATES, dims=(gives, size))),
    )

"""`DrafterSpec`: a model that drafts tokens for another model, the target; and what every drafter asks of its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from compile_and_serve.custom_ops.step import INPUT_IDS, POSITIONS
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.spec import ModelSpec

DrafterKind = Literal["tokens", "hidden", "heads", "block"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # as targets call them


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """A model that drafts.

    kind: "tokens" is a decoder of its own. "hidden" takes a hidden state and the token after it, and gives logits and a hidden state to
    go on with. "heads" takes a hidden state and gives all draft tokens at once. "block" is a decoder that fills in the mask tokens of a
    block.
    target: the target's spec, which gives the hidden states that the drafter reads.
    hidden_size: of the hidden states that `spec` takes. combine: the target gives hidden states of several layers, and a linear
    fc [hidden_size, D · layers] makes one of them.
    maps_tokens: the drafter has a vocabulary of its own; draft token v is the target's token v + d2t[v].
    max_tokens: draft tokens that it can make; None: any number.
    borrowed_weights: parameter → names of the target's tensor that it takes if the drafter's checkpoint has none.
    prefix: of the names of the drafter's tensors in the checkpoint.
    layers_behind: further layers for multi-token prediction. Each reads the hidden states of the one before.
    context: of a block drafter: writes the keys and values of the tokens before the block, from the target's hidden states.
    mask_token: of a block drafter.
    """

    kind: DrafterKind
    spec: ModelSpec
    target: ModelSpec
    hidden_size: int = 0
    combine: bool = False
    maps_tokens: bool = False
    max_tokens: int | None = None
    borrowed_weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prefix: str = ""
    layers_behind: tuple[DrafterSpec, ...] = ()
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
    for one in (INPUT_IDS, POSITIONS):
        if given.get(one.name) != (one.dtype, one.dims):
            raise ModelConfigError(f"The model's steps have no {one.name} of one row, which a drafter reads: remove speculative_config.")
    return target

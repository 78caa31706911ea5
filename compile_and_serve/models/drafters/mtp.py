"""The layers for multi-token prediction that some checkpoints have after their last layer. A family builds each as a model of its own.

Where there is one, it drafts further tokens from its own output. `runtime/drafting/later_layers.py` says what further layers read.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from compile_and_serve.custom_ops.step import ROWS, TOKENS
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec, checked_target, reads_hidden_states
from compile_and_serve.models.drafters.hidden_states import embedding_names, head_names, hidden_size_of, num_layers_of, with_hidden_states
from compile_and_serve.models.families import known_families
from compile_and_serve.models.quantization.stored_weights import with_stored_weights
from compile_and_serve.models.spec import ModelSpec


def mtp(target: ModelSpec, *, dtype: torch.dtype, num_tokens: int) -> DrafterSpec:
    """The target's own layers for multi-token prediction, as many as `num_tokens` drafts need. Raises `ModelConfigError` if it has none."""
    config = target.config
    architecture = (config.get("architectures") or ["?"])[0]
    family = known_families().get(architecture)
    if family is None or family.build_mtp_layer is None or not (count := family.num_mtp_layers(config)):
        families = sorted(name for name, one in known_families().items() if one.build_mtp_layer is not None)
        raise ModelConfigError(
            f"{architecture} brings no layer for multi-token prediction that is known here: it must be one of {', '.join(families)} with "
            "such layers in its config."
        )
    first, size = num_layers_of(target), hidden_size_of(target)
    target = with_hidden_states(checked_target(target), (first,))
    numbers = range(first, first + min(num_tokens, count))
    layers = []
    for number in numbers:
        is_only = len(numbers) == 1
        # The number is part of the config, because it is part of the weights' names, which an artifact holds.
        own = {**config, "mtp_layer_number": number}
        spec = with_stored_weights(family.build_mtp_layer(own, dtype, number, is_only))
        names = [name for name, _ in spec.module.named_parameters()]
        embedding, head = (next(name for name in names if name.endswith(end)) for end in ("embed_tokens.weight", "head.weight"))
        layers.append(
            DrafterSpec(
                spec=reads_hidden_states(spec, size, dtype, gives=ROWS if is_only else TOKENS),
                target=target,
                hidden_size=size,
                borrowed_weights={embedding: embedding_names(target), head: head_names(target)},
                prefix=embedding.removesuffix("embed_tokens.weight"),
            )
        )
    return replace(layers[0], later_layers=tuple(layers[1:]))

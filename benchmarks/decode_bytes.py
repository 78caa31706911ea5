"""The bytes that a decode step must move: what its share of the device's bandwidth is measured by.

- weights: all, but of the experts those that had a token, and no embedding unless the output head shares it;
- keys and values of the sequences' tokens;
- of recurrent layers (custom_ops/recurrent/layer_state.py): checkpoints read; checkpoints written, one step in 16; the entries of rings
  that a step reads, which are those of 22.5 tokens on average where sequences are in random places.
"""

from __future__ import annotations

from typing import Any

import torch

from compile_and_serve.custom_ops.recurrent.layer_state import (
    CHECKPOINT_TOKENS,
    ROLLBACK_TOKENS,
    ConvolutionState,
    JoinedState,
    LinearAttentionState,
    SelectiveScanState,
)
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState
from compile_and_serve.custom_ops.state.recurrent import Recurrent

# A checkpoint lies 15 to 30 tokens back.
_ENTRIES_READ = ROLLBACK_TOKENS + (CHECKPOINT_TOKENS - 1) / 2


def decode_bytes(loaded: Any, batch: int, context: int, distinct_experts: float | None = None) -> int:
    """Of a step of `batch` sequences of `context` tokens.

    loaded: `LoadedModel`. distinct_experts: of a layer, that have a token in the step, on average; None: all of them.
    """
    spec = loaded.spec
    storages = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in loaded.model.weight_memory())}
    stored = sum(storage.nbytes() for storage in storages.values())
    weights = float(stored)
    parameters = dict(spec.module.named_parameters())
    if "lm_head.weight" in parameters:  # a head that shares the embedding is not named twice
        text = spec.config.get("text_config") or spec.config
        weights -= spec.vocab_size * text["hidden_size"] * loaded.dtype.itemsize
    experts = [one for name, one in parameters.items() if ".experts." in name]
    if distinct_experts is not None and experts:
        share_of_experts = sum(one.numel() for one in experts) / sum(one.numel() for one in parameters.values())
        weights -= stored * share_of_experts * (1 - distinct_experts / max(one.shape[0] for one in experts))
    return int(weights + batch * sum(state_bytes(group, context, loaded.cache_dtype) for group in spec.state))


def state_bytes(group: StateGroup, context: int, cache_dtype: torch.dtype) -> float:
    """Of one sequence of `context` tokens."""
    if not isinstance(group.kind, Recurrent):
        return sum(group.bytes_read(context, cache_dtype).values())
    state_dtype = group.kind.dtype
    return sum(_layer_bytes(layer, state_dtype) for layer in group.layers)


def _layer_bytes(layer: LayerState, state_dtype: torch.dtype) -> float:
    if isinstance(layer, JoinedState):
        return sum(_layer_bytes(part, state_dtype) for part in layer.parts)
    checkpoint = 1 + 1 / CHECKPOINT_TOKENS
    if isinstance(layer, LinearAttentionState):
        decays = layer.key_dim if layer.decay_per_channel else 1
        entry = layer.num_key_heads * layer.key_dim * layer.dtype.itemsize + layer.num_heads * (layer.value_dim + decays) * 4
        return checkpoint * layer.num_heads * layer.key_dim * layer.value_dim * state_dtype.itemsize + (_ENTRIES_READ + 1) * entry
    if isinstance(layer, SelectiveScanState):  # a decode goes on from the later state, and reads no entries
        entry = (2 * layer.channels + layer.state_size) * layer.dtype.itemsize
        return checkpoint * layer.channels * layer.state_size * state_dtype.itemsize + entry
    if isinstance(layer, ConvolutionState):
        return layer.width * layer.channels * layer.dtype.itemsize
    raise ValueError(f"The bytes of {type(layer).__name__} are unknown here.")

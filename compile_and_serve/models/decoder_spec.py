"""`decoder_spec`: the `ModelSpec` of a decoder whose layers differ from Llama's in their modules only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import ScoreFeature
from compile_and_serve.custom_ops.state.tokens import ALL_TOKENS, KV_CACHES, WINDOW_CACHES, KVCacheSpec, TokenWindow
from compile_and_serve.models.config import DecoderConfig, WindowedConfig
from compile_and_serve.models.layers import inverse_frequencies, max_positions
from compile_and_serve.models.meta_device import meta_device
from compile_and_serve.models.spec import ModelSpec, ShardStyle, full_attention

DECODER_TP_PLAN: Mapping[str, ShardStyle] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}


def decoder_spec(
    make: Callable[[], nn.Module],
    decoder: DecoderConfig,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    state: Sequence[StateGroup] | None = None,
    scores: frozenset[ScoreFeature] = frozenset(),
    tp_plan: Mapping[str, ShardStyle] = DECODER_TP_PLAN,
) -> ModelSpec:
    """The spec of `make()`, a module with a decoder's inputs.

    config: the whole config.json. state: None: a KV cache per layer. scores: of layers of a `WindowedConfig`.
    """
    module = on_meta(make, dtype)
    ropes = {"model.rotary_emb.inv_freq": decoder.rope}
    if isinstance(decoder, WindowedConfig):
        ropes["model.window_rotary_emb.inv_freq"] = decoder.window_rope
    names = [name for name, _ in module.named_buffers()]
    # Tensors of a checkpoint that the model does not read.
    unused: dict[str, str | None] = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(decoder.num_hidden_layers)}
    if decoder.tie_word_embeddings:
        unused["lm_head.weight"] = None
    return ModelSpec(
        module=module,
        config=config,
        state=tuple(_attention_groups(decoder, scores) if state is None else state),
        vocab_size=decoder.vocab_size,
        max_model_len=max_positions(decoder),
        weight_map=unused,
        tp_plan=tp_plan,
        buffers={name: inverse_frequencies(rope, decoder.rope_size) for name, rope in ropes.items() if name in names},
    )


def on_meta(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """`make()` on the meta device, with its parameters in `dtype`."""
    with meta_device():
        module = make()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.requires_grad_(False).eval()


def _attention_groups(decoder: DecoderConfig, scores: frozenset[ScoreFeature]) -> list[StateGroup]:
    """The layers with full attention, and those with a window."""
    layer = KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim)
    if not isinstance(decoder, WindowedConfig):
        return [full_attention([layer] * decoder.num_hidden_layers)]
    groups = []
    for name in (KV_CACHES, WINDOW_CACHES):
        numbers = decoder.layer_numbers(with_window=name == WINDOW_CACHES)
        if numbers:
            window = decoder.windows[numbers[0]]
            kind = ALL_TOKENS if window is None else TokenWindow(size=window)
            groups.append(StateGroup(name=name, layers=(layer,) * len(numbers), kind=kind, scores=scores))
    return groups

"""`hybrid_spec`: decoders of which each layer has an attention cache, a recurrent state, both or neither.

Shape legend: T tokens of the step, L rows whose logits are needed, D hidden size, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.mesh import AlongAxis, ColwiseParts
from compile_and_serve.custom_ops.recurrent.layer_state import recurrent_group
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, AttentionLayer, KVCacheSpec
from compile_and_serve.models.config import DecoderConfig, ModelConfigError
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.layers import RotaryEmbedding, apply_rope
from compile_and_serve.models.spec import ModelSpec, ShardedModule, ShardStyle

LayerKind = Literal["attention", "recurrent", "both", "neither"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """What a hybrid model has around its layers.

    kinds: what each layer keeps: its `forward` takes x, cos, sin, and then a KV cache, a recurrent state, both or neither.
    norm: makes the last norm. has_rope: if not, cos and sin are None. embedding_scale, logits_scale: factors.
    embedding_name, norm_name: as checkpoints call them.
    """

    decoder: DecoderConfig
    kinds: tuple[LayerKind, ...]
    norm: Callable[[], nn.Module]
    has_rope: bool = True
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    norm_name: str = "norm"

    @property
    def num_caches(self) -> int:
        return sum(kind in ("attention", "both") for kind in self.kinds)

    @property
    def num_states(self) -> int:
        return sum(kind in ("recurrent", "both") for kind in self.kinds)


class HybridModel(nn.Module):
    def __init__(self, config: HybridConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.decoder.vocab_size, config.decoder.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.decoder) if config.has_rope else None
        self.layers = nn.ModuleList(layers)
        self.add_module(config.norm_name, config.norm())

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        states: Sequence[Any],
        logits_indices_L: torch.Tensor,
    ) -> torch.Tensor:
        """→ normed rows [L, D]"""
        config = self.config
        x_TD = self.embed_tokens(input_ids_T)
        if config.embedding_scale != 1.0:
            x_TD = x_TD * config.embedding_scale
        cos_TE, sin_TE = (None, None) if self.rotary_emb is None else self.rotary_emb(positions_T, x_TD.dtype)
        caches, recurrent = iter(kv_caches), iter(states)
        for layer, kind in zip(self.layers, config.kinds, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, *_kept(kind, caches, recurrent))
        norm: nn.Module = getattr(self, config.norm_name)
        return norm(x_TD[logits_indices_L])


def _kept(kind: LayerKind, caches: Iterator[torch.Tensor], states: Iterator[Any]) -> list[Any]:
    kept = [next(caches)] if kind in ("attention", "both") else []
    return kept + ([next(states)] if kind in ("recurrent", "both") else [])


class HybridForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], logits_indices int64 [L], KV caches, recurrent states) → logits [L, V].

    A model without attention, or without recurrent layers, gets no argument for them.
    """

    def __init__(self, config: HybridConfig, make_layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        decoder = config.decoder
        self.model = HybridModel(config, [make_layer(number) for number in range(len(config.kinds))])
        self.lm_head = nn.Linear(decoder.hidden_size, decoder.vocab_size, bias=False)
        if decoder.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        kv_caches: Sequence[torch.Tensor] = (),
        recurrent_states: Sequence[Any] = (),
    ) -> torch.Tensor:
        logits_LV = self.lm_head(self.model(input_ids, positions, kv_caches, recurrent_states, logits_indices))
        scale = self.model.config.logits_scale
        return logits_LV if scale == 1.0 else logits_LV * scale


class HybridAttention(ShardedModule):
    """Llama's attention with another scale, without RoPE where cos is None. key_scale: a factor of the keys."""

    def __init__(self, config: DecoderConfig, scale: float | None = None, key_scale: float = 1.0) -> None:
        super().__init__()
        self.head_dim, self.key_scale = config.head_dim, key_scale
        self.scale = config.head_dim**-0.5 if scale is None else scale
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        return {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor | None, sin_TE: torch.Tensor | None, kv_cache: torch.Tensor) -> torch.Tensor:
        q_THE, k_TKE, v_TKE = (part(x_TD).view(x_TD.shape[0], -1, self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.key_scale != 1.0:
            k_TKE = k_TKE * self.key_scale
        if cos_TE is not None and sin_TE is not None:
            q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        return self.o_proj(attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale).flatten(1))


def layer_kinds(types: Sequence[str], num_layers: int, recurrent: str) -> tuple[LayerKind, ...]:
    """What each layer keeps, from a config.json's list. recurrent: its word for layers with recurrent state. Raises `ModelConfigError`."""
    words: dict[str, LayerKind] = {recurrent: "recurrent", "full_attention": "attention", "attention": "attention"}
    if len(types) != num_layers or not set(types) <= words.keys():
        raise ModelConfigError(
            f"The layer types in the model's config must be {num_layers} times {recurrent!r} or 'full_attention', got {list(types)}."
        )
    return tuple(words[kind] for kind in types)


def hybrid_spec(
    hybrid: HybridConfig,
    make_layer: Callable[[int], nn.Module],
    state: LayerState,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    tp_plan: Mapping[str, ShardStyle] = DECODER_TP_PLAN,
    names: Mapping[str, str] | None = None,
    cache: AttentionLayer | None = None,
) -> ModelSpec:
    """The spec of a hybrid model. make_layer: makes the layer of a number. state: of each recurrent layer.

    cache: of each layer with attention; None: keys and values as the decoder says.
    names: parts of our parameters' names → what checkpoints have in their place, applied in order. tp_plan: of what is no
    `ShardedModule`; these have plans of their own.
    """
    decoder = hybrid.decoder
    groups = []
    if hybrid.num_caches:
        cache = cache or KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim)
        groups.append(StateGroup(name=KV_CACHES, layers=(cache,) * hybrid.num_caches))
    if hybrid.num_states:
        groups.append(recurrent_group([state] * hybrid.num_states))
    spec = decoder_spec(partial(HybridForCausalLM, hybrid, make_layer), decoder, config, dtype, state=groups, tp_plan=tp_plan)
    plan: dict[str, ShardStyle | AlongAxis | ColwiseParts] = {
        f"{name}.{linear}": style
        for name, part in spec.module.named_modules()
        if isinstance(part, ShardedModule)
        for linear, style in part.tp_plan().items()
    }
    renamed: dict[str, str | None] = {}
    for ours, _ in spec.module.named_parameters():
        theirs = ours
        for part, other in (names or {}).items():
            theirs = theirs.replace(part, other)
        if theirs != ours:
            renamed[theirs] = ours
    return replace(spec, weight_map={**spec.weight_map, **renamed}, tp_plan=plan | dict(spec.tp_plan))

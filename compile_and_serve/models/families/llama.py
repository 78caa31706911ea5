"""Llama and models with its architecture: Llama 2 and 3.x, SmolLM2, TinyLlama.

Shape legend: T tokens of the step, S rows whose logits are needed, D hidden size, H query heads, K key/value heads,
E head size, V vocabulary. Views use -1 for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.config_fields import DECODER_FIELDS
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.layers import GatedMlp, RotaryEmbedding, apply_rope
from compile_and_serve.models.spec import ModelSpec


class LlamaAttention(nn.Module):
    """group: the state group of the layer's cache. input_size: features of the input; None: D.

    Related families set q_norm and k_norm, which each query and key head passes before RoPE, and sinks [H], a score of each query head.
    """

    def __init__(self, config: DecoderConfig, group: str = KV_CACHES, input_size: int | None = None) -> None:
        super().__init__()
        input_size = input_size or config.hidden_size
        self.head_dim = config.head_dim
        self.scale, self.group = config.head_dim**-0.5, group
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.sinks: nn.Parameter | None = None

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q_THE = self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        k_TKE = self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_THE, k_TKE = self.q_norm(q_THE), self.k_norm(k_TKE)
        q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale, self.group, sinks_H=self.sinks)
        return self.o_proj(out_THE.flatten(1))


class LlamaDecoderLayer(nn.Module):
    """self_attn, mlp: of a related family; None: Llama's."""

    def __init__(self, config: DecoderConfig, self_attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config) if self_attn is None else self_attn
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config) if mlp is None else mlp

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TE, sin_TE, kv_cache)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class LlamaModel(nn.Module):
    def __init__(self, config: DecoderConfig, layers: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        if layers is None:
            layers = (LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, kv_caches: list[torch.Tensor], logits_indices_S: torch.Tensor
    ) -> torch.Tensor:
        """→ normed rows [S, D]"""
        x_TD = self.embed_tokens(input_ids_T)
        cos_TE, sin_TE = self.rotary_emb(positions_T, x_TD.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, kv_cache)
        return self.norm(x_TD[logits_indices_S])


class LlamaForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache per layer, logits_indices int64 [S]) → logits [S, V].

    layers: of a related family, with the same `forward` as
    `LlamaDecoderLayer`; None: Llama's.
    """

    def __init__(self, config: DecoderConfig, layers: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.model = LlamaModel(config, layers)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor], logits_indices: torch.Tensor
    ) -> torch.Tensor:
        return self.lm_head(self.model(input_ids, positions, kv_caches, logits_indices))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = DecoderConfig.from_dict(config)
    return decoder_spec(lambda: LlamaForCausalLM(decoder), decoder, config, dtype)


register_model("LlamaForCausalLM", build, fields=DECODER_FIELDS)

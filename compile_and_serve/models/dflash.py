"""DFlash block drafters (arXiv:2602.06036): a few decoder layers that draft a block of tokens in one pass.

Shape legend: T tokens, F features of the target's hidden states, D hidden size, K key/value heads, E head size.

A block is the last token of a sequence, and a mask token for each draft. Attention in the block is not causal: each token reads all of it.
Before the block, it reads the context: keys and values that are made from the target's hidden states.

So the drafter has two models over one KV cache. A Qwen3 decoder computes blocks, and `DFlashContext` writes the context.
"""

from __future__ import annotations

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.layers import RotaryEmbedding, apply_rope


class ContextAttention(nn.Module):
    """The keys and values of a layer of the block's decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size = config.num_key_value_heads * config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> None:
        k_TKE = self.k_norm(self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        # Steps of this model have no sequences, so the op only writes: any tensor of the right shape does for the queries.
        attention(v_TKE, apply_rope(k_TKE, cos_TE, sin_TE), v_TKE, kv_cache, 1.0)


class ContextLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = ContextAttention(config)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> None:
        self.self_attn(x_TD, cos_TE, sin_TE, kv_cache)


class DFlashContextModel(nn.Module):
    def __init__(self, config: DecoderConfig, num_features: int) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(config)
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(ContextLayer(config) for _ in range(config.num_hidden_layers))


class DFlashContext(nn.Module):
    """forward(hidden_states [T, F], positions int64 [T], a KV cache per layer) → the context [T, D], from which all layers make their keys
    and values.
    """

    def __init__(self, config: DecoderConfig, num_features: int) -> None:
        super().__init__()
        self.model = DFlashContextModel(config, num_features)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        x_TD = self.model.hidden_norm(self.model.fc(hidden_states))
        cos_TE, sin_TE = self.model.rotary_emb(positions, x_TD.dtype)
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            layer(x_TD, cos_TE, sin_TE, kv_cache)
        return x_TD

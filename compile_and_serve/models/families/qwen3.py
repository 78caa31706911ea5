"""Dense Qwen3: Llama with an RMSNorm over each query and key head before RoPE.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads, E head size. Views use -1 for head counts, so that
sharded projections need no change here.
"""

from __future__ import annotations

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.layers import apply_rope


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q_THE = self.q_norm(self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        k_TKE = self.k_norm(self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale, self.group)
        return self.o_proj(out_THE.flatten(1))


class Qwen3ForCausalLM(LlamaForCausalLM):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache per layer, logits_indices int64 [S]) → logits [S, V]."""

    def __init__(self, config: DecoderConfig) -> None:
        layers = (LlamaDecoderLayer(config, Qwen3Attention(config)) for _ in range(config.num_hidden_layers))
        super().__init__(config, layers)

"""GLM-4.5 and GLM-4.6: attention whose RoPE covers a part of each head. The other parts of a layer are in `deepseek_moe`.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads, E head size, R part of a head with RoPE. Views use -1
for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.step import KVCacheSpec
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.families.deepseek_moe import DeepseekMoeConfig
from compile_and_serve.models.families.llama import LlamaAttention
from compile_and_serve.models.layers import apply_partial_rope

# What a config.json leaves out.
_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4MoeConfig:
    """A config.json of GLM-4-MoE. qk_norm: each query and key head has an RMSNorm before RoPE."""

    decoder: DecoderConfig
    moe: DeepseekMoeConfig
    qk_norm: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Glm4MoeConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        config = {**_DEFAULTS, **config}
        decoder = DecoderConfig.from_dict(config, allows_partial_rope=True)
        return cls(
            decoder=decoder,
            moe=DeepseekMoeConfig.read(config, decoder, ("sigmoid", "noaux_tc")),
            qk_norm=bool(config.get("use_qk_norm", False)),
        )

    @property
    def layer_cache(self) -> KVCacheSpec:
        """What each layer keeps: [N, 2, K, P, E]."""
        return KVCacheSpec(num_kv_heads=self.decoder.num_key_value_heads, head_dim=self.decoder.head_dim)

    def make_attention(self) -> Glm4MoeAttention:
        """The attention of a layer."""
        return Glm4MoeAttention(self)


class Glm4MoeAttention(LlamaAttention):
    """Llama's attention with RoPE over the first R dimensions of a head, and no bias of the output."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        decoder = config.decoder
        super().__init__(decoder)
        self.o_proj = nn.Linear(decoder.num_attention_heads * self.head_dim, decoder.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=decoder.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q_THE = self.q_norm(self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        k_TKE = self.k_norm(self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        q_THE, k_TKE = apply_partial_rope(q_THE, cos_TR, sin_TR), apply_partial_rope(k_TKE, cos_TR, sin_TR)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale, self.group)
        return self.o_proj(out_THE.flatten(1))

"""OLMoE: a mixture of experts, with norms over all queries and all keys.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads, E head size. Views use -1 for head counts, so that
sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.config_fields import DECODER_FIELDS, EXPERT_FIELDS
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention
from compile_and_serve.models.families.moe import moe_spec
from compile_and_serve.models.layers import apply_rope
from compile_and_serve.models.spec import ModelSpec


class OlmoeAttention(LlamaAttention):
    """Llama's attention with an RMSNorm over all queries together, and one over all keys. clip_qkv: limit of attention's inputs."""

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: DecoderConfig, clip_qkv: float | None) -> None:
        super().__init__(config)
        self.q_norm = nn.RMSNorm(config.num_attention_heads * self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.num_key_value_heads * self.head_dim, eps=config.rms_norm_eps)
        self.clip_qkv = clip_qkv

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_norm(self.q_proj(x_TD)), self.k_norm(self.k_proj(x_TD)), self.v_proj(x_TD)
        if self.clip_qkv is not None:
            q, k, v = (value.clamp(-self.clip_qkv, self.clip_qkv) for value in (q, k, v))
        q_THE, k_TKE, v_TKE = (value.view(x_TD.shape[0], -1, self.head_dim) for value in (q, k, v))
        q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale)
        return self.o_proj(out_THE.flatten(1))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    clip_qkv = None if config.get("clip_qkv") is None else float(config["clip_qkv"])
    return moe_spec({"rms_norm_eps": 1e-5, **config}, dtype, lambda decoder: OlmoeAttention(decoder, clip_qkv))


_FIELDS = {**DECODER_FIELDS, **EXPERT_FIELDS, "clip_qkv": "number"}
register_model("OlmoeForCausalLM", build, features=("full attention", "experts"), fields=_FIELDS)

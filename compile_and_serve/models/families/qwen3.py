"""Qwen3 and Qwen3-MoE: Llama with an RMSNorm over each query and key head before RoPE.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads, E head size. Views use -1 for head counts, so that
sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.config_fields import DECODER_FIELDS, EXPERT_FIELDS
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.families.moe import moe_spec
from compile_and_serve.models.spec import ModelSpec


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache per layer, logits_indices int64 [S]) → logits [S, V]."""

    def __init__(self, config: DecoderConfig) -> None:
        layers = (LlamaDecoderLayer(config, Qwen3Attention(config)) for _ in range(config.num_hidden_layers))
        super().__init__(config, layers)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = DecoderConfig.from_dict(config, default_head_dim=128)
    return decoder_spec(lambda: Qwen3ForCausalLM(decoder), decoder, config, dtype)


def build_moe(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return moe_spec(config, dtype, Qwen3Attention)


register_model("Qwen3ForCausalLM", build, fields=DECODER_FIELDS)
register_model("Qwen3MoeForCausalLM", build_moe, features=("full attention", "experts"), fields={**DECODER_FIELDS, **EXPERT_FIELDS})

"""Qwen2 and Qwen2-MoE: Llama with biases of queries, keys and values. Some layers of Qwen2 may attend to a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.models.config import DecoderConfig, WindowedConfig, number
from compile_and_serve.models.config_fields import DECODER_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer
from compile_and_serve.models.families.mistral import NO_BIAS, WindowedForCausalLM
from compile_and_serve.models.families.moe import moe_spec
from compile_and_serve.models.spec import ModelSpec


class Qwen2Attention(LlamaAttention):
    """Llama's attention with biases of the queries, keys and values only."""

    def __init__(self, config: DecoderConfig, group: str = KV_CACHES) -> None:
        super().__init__(config, group)
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    """Qwen2: layers from max_window_layers on have the window, if it is used."""
    first = int(number(config, "max_window_layers", 28))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    decoder = WindowedConfig.read({**config, **NO_BIAS, "sliding_window": window}, has_window=lambda layer: layer >= first)
    make = partial(WindowedForCausalLM, decoder, lambda group: LlamaDecoderLayer(decoder, Qwen2Attention(decoder, group)))
    return decoder_spec(make, decoder, config, dtype)


def build_moe(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return moe_spec(config, dtype, Qwen2Attention)


_FIELDS = {**DECODER_FIELDS, **WINDOW_FIELDS, "max_window_layers": "integer"}
register_model("Qwen2ForCausalLM", build, features=("full attention", "sliding windows"), fields=_FIELDS)
register_model("Qwen2MoeForCausalLM", build_moe, features=("full attention", "experts"), fields={**DECODER_FIELDS, **EXPERT_FIELDS})

"""LFM2: gated short convolutions, and now and then a layer of attention. The experts of LFM2-MoE are not built here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.recurrent.layer_state import ConvolutionState, StatePart
from compile_and_serve.models.config import DecoderConfig, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from compile_and_serve.models.families.qwen3 import Qwen3Attention
from compile_and_serve.models.hybrid import HybridConfig, hybrid_spec, layer_kinds
from compile_and_serve.models.layers import GatedMlp
from compile_and_serve.models.recurrent_layers import GatedShortConvolution, convolved_channels
from compile_and_serve.models.spec import ModelSpec

# Our names, which are Llama's → checkpoints'.
_NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}


class ConvolutionLayer(nn.Module):
    def __init__(self, config: DecoderConfig, conv: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.conv = conv
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, state: StatePart) -> torch.Tensor:
        x_TD = x_TD + self.conv(self.input_layernorm(x_TD), state)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


def _decoder(config: Mapping[str, Any]) -> DecoderConfig:
    known = {
        "intermediate_size": config.get("block_ff_dim"),
        "rms_norm_eps": config.get("norm_eps", 1e-5),
        "rope_theta": 1e6,
        "tie_word_embeddings": config.get("tie_embedding", True),
        **config,
    }
    if config.get("block_ff_dim"):
        known["intermediate_size"] = config["block_ff_dim"]
    decoder = DecoderConfig.from_dict(known)
    if not config.get("block_auto_adjust_ff_dim", True):
        return decoder
    size = 2 * decoder.intermediate_size // 3
    size = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * size)
    multiple = positive_int(config, "block_multiple_of", 256)
    return replace(decoder, intermediate_size=-(-size // multiple) * multiple)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = _decoder(config)
    num_layers, width = decoder.num_hidden_layers, positive_int(config, "conv_L_cache", 3)
    attending = config.get("full_attn_idxs")
    numbers = range(num_layers) if attending is None else attending
    types = config.get("layer_types") or ["full_attention" if i in numbers else "conv" for i in range(num_layers)]
    kinds = layer_kinds(types, num_layers, "conv")

    def make_layer(number: int) -> nn.Module:
        if kinds[number] == "attention":
            return LlamaDecoderLayer(decoder, Qwen3Attention(decoder))
        return ConvolutionLayer(decoder, GatedShortConvolution(decoder.hidden_size, width, bias=bool(config.get("conv_bias", False))))

    norm = partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, norm_name="embedding_norm")
    size = decoder.hidden_size
    kept = ConvolutionState(channels=size, width=width, dtype=dtype, parts=convolved_channels(size))
    return hybrid_spec(hybrid, make_layer, kept, config, dtype, names=_NAMES)


register_model("Lfm2ForCausalLM", build, features=("full attention", "short convolutions"))

"""LFM2: gated short convolutions, and now and then a layer of attention; dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.recurrent.layer_state import ConvolutionState, StatePart
from compile_and_serve.models.config import DecoderConfig, number, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.deepseek_moe import DeepseekMoe, DeepseekMoeConfig, widen_choice_biases
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from compile_and_serve.models.families.moe import MOE_TP_PLAN, ExpertNames, with_expert_parts
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
    "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
    "mlp.gate.": "feed_forward.gate.",
}


class ConvolutionLayer(nn.Module):
    def __init__(self, config: DecoderConfig, conv: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.conv = conv
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, state: StatePart) -> torch.Tensor:
        x_TD = x_TD + self.conv(self.input_layernorm(x_TD), state)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class BiasedMoe(DeepseekMoe):
    """Experts without a shared one. [T, D] → [T, D]"""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.routed(x_TD)


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


def _build(config: Mapping[str, Any], dtype: torch.dtype, decoder: DecoderConfig, moe: DeepseekMoeConfig | None) -> ModelSpec:
    num_layers, width = decoder.num_hidden_layers, positive_int(config, "conv_L_cache", 3)
    attending = config.get("full_attn_idxs")
    numbers = range(num_layers) if attending is None else attending
    types = config.get("layer_types") or ["full_attention" if i in numbers else "conv" for i in range(num_layers)]
    kinds = layer_kinds(types, num_layers, "conv")

    def make_layer(number: int) -> nn.Module:
        mlp = BiasedMoe(decoder, moe) if moe is not None and moe.sparse_layers[number] else GatedMlp(decoder)
        if kinds[number] == "attention":
            return LlamaDecoderLayer(decoder, Qwen3Attention(decoder), mlp)
        return ConvolutionLayer(decoder, GatedShortConvolution(decoder.hidden_size, width, bias=bool(config.get("conv_bias", False))), mlp)

    norm = partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, norm_name="embedding_norm")
    size = decoder.hidden_size
    kept = ConvolutionState(channels=size, width=width, dtype=dtype, parts=convolved_channels(size))
    plan = DECODER_TP_PLAN if moe is None else MOE_TP_PLAN
    return hybrid_spec(hybrid, make_layer, kept, config, dtype, tp_plan=plan, names=_NAMES)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return _build(config, dtype, _decoder(config), None)


def build_moe(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = _decoder({**config, "block_auto_adjust_ff_dim": False})
    num_dense = int(config.get("num_dense_layers", 2))
    moe = DeepseekMoeConfig(
        hidden_size=decoder.hidden_size,
        num_experts=positive_int(config, "num_experts", 32),
        top_k=positive_int(config, "num_experts_per_tok", 4),
        intermediate_size=positive_int(config, "moe_intermediate_size", 1792),
        renormalize=bool(config.get("norm_topk_prob", True)),
        sparse_layers=tuple(i >= num_dense for i in range(decoder.num_hidden_layers)),
        num_shared=0,
        scoring="sigmoid",
        has_bias=bool(config.get("use_expert_bias", True)),
        expert_scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=1,
        top_groups=1,
        group_best=1,
    )
    spec = _build(config, dtype, decoder, moe)
    widen_choice_biases(spec.module)
    return with_expert_parts(spec, moe, ExpertNames(gate="w1", up="w3", down="w2", block="feed_forward"))


register_model("Lfm2ForCausalLM", build, features=("full attention", "short convolutions"))
register_model("Lfm2MoeForCausalLM", build_moe, features=("full attention", "short convolutions", "experts"))

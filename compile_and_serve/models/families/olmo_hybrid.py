"""OLMo-Hybrid: Gated DeltaNet with a projection each, and attention with norms behind it, mostly without RoPE.

Shape legend: T tokens of the step, D hidden size, C channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.mesh import ColwiseParts
from compile_and_serve.custom_ops.recurrent.layer_state import StatePart
from compile_and_serve.models.config import DecoderConfig, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention
from compile_and_serve.models.hybrid import HybridConfig, hybrid_spec, layer_kinds
from compile_and_serve.models.layers import GatedMlp, apply_rope
from compile_and_serve.models.recurrent_layers import DeltaNetConfig, GatedDeltaNet, SplitConvolution
from compile_and_serve.models.spec import ModelSpec, ShardStyle

_NORM_EPS = 1e-5  # of the norm behind the memory, whatever the config's rms_norm_eps


class OlmoDeltaNet(GatedDeltaNet):
    """beta_scale: factor of beta; with 2 the memory may turn values around (linear_allow_neg_eigval)."""

    def __init__(self, config: DeltaNetConfig, beta_scale: float) -> None:
        super().__init__(config, beta_scale=beta_scale)
        sizes = (config.keys_size, config.keys_size, config.values_size)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, size, bias=False) for size in sizes)
        self.g_proj = nn.Linear(config.hidden_size, config.values_size, bias=False)
        self.a_proj, self.b_proj = (nn.Linear(config.hidden_size, config.num_heads, bias=False) for _ in range(2))
        self.conv1d = SplitConvolution(sizes, config.width)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        keys, _, values = self.config.convolved_parts
        of_keys, of_values = dict.fromkeys(("q_proj", "k_proj"), ColwiseParts((keys,))), ColwiseParts((values,))
        return {**of_keys, "v_proj": of_values, "g_proj": of_values, "a_proj": "colwise", "b_proj": "colwise", "out_proj": "rowwise"}

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv_TC = torch.cat((self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)), dim=-1)
        return qkv_TC, self.g_proj(x_TD), self.b_proj(x_TD), self.a_proj(x_TD)


class NormedAttention(LlamaAttention):
    """Llama's attention with an RMSNorm over all queries, and one over all keys; without RoPE where cos is None."""

    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.q_norm = nn.RMSNorm(config.num_attention_heads * config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.num_key_value_heads * config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor | None, sin_TE: torch.Tensor | None, kv_cache: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_norm(self.q_proj(x_TD)), self.k_norm(self.k_proj(x_TD)), self.v_proj(x_TD)
        q_THE, k_TKE, v_TKE = (part.view(x_TD.shape[0], -1, self.head_dim) for part in (q, k, v))
        if cos_TE is not None and sin_TE is not None:
            q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        return self.o_proj(attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale).flatten(1))


class NormedBehindLayer(nn.Module):
    """Attention and an MLP, each with a norm behind it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = NormedAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.post_attention_layernorm(self.self_attn(x_TD, cos_TE, sin_TE, kv_cache))
        return x_TD + self.post_feedforward_layernorm(self.mlp(x_TD))


class OlmoDeltaNetLayer(nn.Module):
    def __init__(self, config: DecoderConfig, linear_attn: nn.Module) -> None:
        super().__init__()
        self.attention_layer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.linear_attn = linear_attn
        self.feedforward_layer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, state: tuple[StatePart, ...]) -> torch.Tensor:
        x_TD = x_TD + self.linear_attn(self.attention_layer_norm(x_TD), state)
        return x_TD + self.mlp(self.feedforward_layer_norm(x_TD))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    heads = positive_int(config, "num_attention_heads")
    has_rope = (config.get("rope_parameters") or {}).get("rope_theta") is not None or config.get("rope_theta") is not None
    decoder = DecoderConfig.from_dict({"max_position_embeddings": 65536, **config})
    num_heads = config.get("linear_num_key_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * decoder.hidden_size / num_heads)
    given = {
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_dim,
    }
    delta = DeltaNetConfig.from_dict({**config, **given, "rms_norm_eps": _NORM_EPS})
    num_layers = decoder.num_hidden_layers
    types = config.get("layer_types") or ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    kinds = layer_kinds(types, num_layers, "linear_attention")
    beta_scale = 2.0 if config.get("linear_allow_neg_eigval", True) else 1.0

    def make_layer(number: int) -> nn.Module:
        if kinds[number] == "attention":
            return NormedBehindLayer(decoder)
        return OlmoDeltaNetLayer(decoder, OlmoDeltaNet(delta, beta_scale))

    norm = partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, has_rope=has_rope)
    names = {"linear_attn.norm": "linear_attn.o_norm", "linear_attn.out_proj": "linear_attn.o_proj", "linear_attn.conv1d.": "linear_attn."}
    spec = hybrid_spec(hybrid, make_layer, delta.state(dtype), config, dtype, names=names)
    # transformers gives the norms of all layers the names of those with a memory when it writes a checkpoint.
    attending = [i for i, kind in enumerate(kinds) if kind == "attention"]
    written = {f"model.layers.{i}.feedforward_layer_norm.weight": f"model.layers.{i}.post_attention_layernorm.weight" for i in attending}
    return replace(spec, weight_map={**spec.weight_map, **written})


register_model("OlmoHybridForCausalLM", build, features=("full attention", "Gated DeltaNet"))

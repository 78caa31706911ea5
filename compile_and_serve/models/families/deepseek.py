"""DeepSeek-V2, V3 and R1, and Kimi-K2: multi-head latent attention. The other parts of a layer are in `deepseek_moe`.

Shape legend: T tokens of the step, D hidden size, H heads, N and R sizes of a query's parts without and with RoPE, V size of a head's
value, C size of the latent. Views use -1 for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.mla import mla_attention
from compile_and_serve.custom_ops.state.tokens import LatentCacheSpec
from compile_and_serve.models.config import DecoderConfig, UnsupportedConfigError, positive_int
from compile_and_serve.models.config_fields import LATENT_FIELDS
from compile_and_serve.models.families.deepseek_moe import ROUTINGS, DeepseekMoeConfig, DeepseekMoeModelConfig, register_deepseek_moe
from compile_and_serve.models.layers import yarn_magnitude

_LATENT_EPS = 1e-6  # of the norms over latents, whatever the config's rms_norm_eps


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionConfig:
    """The attention of DeepSeek's families. decoder.head_dim is the size of the part with RoPE.

    q_rank: size of the queries' latent; None without one. scale: of the attention scores.
    """

    decoder: DecoderConfig
    q_rank: int | None
    latent_size: int
    nope_size: int
    value_size: int
    scale: float
    interleaved: bool


def read(config: Mapping[str, Any]) -> DeepseekMoeModelConfig:
    """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
    rope_size = positive_int(config, "qk_rope_head_dim")
    decoder = DecoderConfig.from_dict({**config, "head_dim": rope_size})
    nope_size = positive_int(config, "qk_nope_head_dim")
    is_v3 = "DeepseekV3ForCausalLM" in (config.get("architectures") or ())
    scoring: Any = config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
    method: Any = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if (scoring, method) not in ROUTINGS:
        known = " or ".join(f"{one!r} with {other!r}" for one, other in ROUTINGS)
        raise UnsupportedConfigError(f"scoring_func is {scoring!r} with topk_method {method!r}: expected {known}.")
    moe = DeepseekMoeConfig.read(config, decoder, (scoring, method))
    attention = LatentAttentionConfig(
        decoder=decoder,
        q_rank=None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank"),
        latent_size=positive_int(config, "kv_lora_rank"),
        nope_size=nope_size,
        value_size=positive_int(config, "v_head_dim"),
        scale=(nope_size + rope_size) ** -0.5 * _temperature(decoder.rope) ** 2,
        interleaved=bool(config.get("rope_interleave", True)),
    )
    return DeepseekMoeModelConfig(
        decoder=decoder,
        moe=moe,
        layer_cache=LatentCacheSpec(latent_size=attention.latent_size, rope_size=rope_size),  # [N, P, C + R]
        make_attention=lambda: LatentAttention(attention),
    )


def _temperature(rope: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by beside the amplitude of cos and sin."""
    is_scaled = rope["rope_type"] == "yarn" and rope.get("mscale_all_dim")
    return yarn_magnitude(rope, "mscale_all_dim") if is_scaled else 1.0


class LatentAttention(nn.Module):
    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        decoder, hidden = config.decoder, config.decoder.hidden_size
        heads, self.q_head_size = decoder.num_attention_heads, config.nope_size + decoder.head_dim
        self.scale, self.interleaved = config.scale, config.interleaved
        if config.q_rank is None:
            self.q_proj = nn.Linear(hidden, heads * self.q_head_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_rank, bias=decoder.attention_bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_rank, eps=_LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_rank, heads * self.q_head_size, bias=False)
        self.has_q_latent = config.q_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.latent_size + decoder.head_dim, bias=decoder.attention_bias)
        self.kv_a_layernorm = nn.RMSNorm(config.latent_size, eps=_LATENT_EPS)
        self.kv_b_proj = nn.Linear(config.latent_size, heads * (config.nope_size + config.value_size), bias=False)
        self.o_proj = nn.Linear(heads * config.value_size, hidden, bias=decoder.attention_bias)

    def forward(self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))) if self.has_q_latent else self.q_proj(x_TD)
        q_THE = q.view(x_TD.shape[0], -1, self.q_head_size)
        out_THV = mla_attention(
            q_THE,
            self.kv_a_proj_with_mqa(x_TD),
            self.kv_a_layernorm.weight,
            cos_TR,
            sin_TR,
            self.kv_b_proj.weight,
            cache,
            self.scale,
            eps=_LATENT_EPS,
            interleaved=self.interleaved,
        )
        return self.o_proj(out_THV.flatten(1))


register_deepseek_moe("DeepseekV2ForCausalLM", read, LATENT_FIELDS)
register_deepseek_moe("DeepseekV3ForCausalLM", read, LATENT_FIELDS)

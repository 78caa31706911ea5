"""DeepSeek-V2, V3 and R1, and Kimi-K2: multi-head latent attention, and mixtures of experts with shared experts.

Shape legend: T tokens of the step, D hidden size, H heads, N and R sizes of a query's parts without and with RoPE, V size of a head's
value, C size of the latent, X experts. Views use -1 for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.attention.mla import mla_attention
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError, positive_int
from compile_and_serve.models.layers import GatedMlp, yarn_magnitude
from compile_and_serve.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.moe import Experts, MoeConfig

_LATENT_EPS = 1e-6  # of the norms over latents, whatever the config's rms_norm_eps


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekConfig:
    """A config.json of DeepSeek's families. decoder.head_dim is the size of the part with RoPE.

    q_rank: size of the queries' latent; None without one. scale: of the attention scores. num_shared: number of shared experts, which are
    one MLP. num_groups, top_groups, group_best: as in `cas::route`.
    """

    decoder: DecoderConfig
    moe: MoeConfig
    q_rank: int | None
    latent_size: int
    nope_size: int
    value_size: int
    scale: float
    interleaved: bool
    num_shared: int
    scoring: Literal["softmax", "sigmoid"]
    has_bias: bool
    expert_scale: float
    num_groups: int
    top_groups: int
    group_best: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepseekConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        rope_size = positive_int(config, "qk_rope_head_dim")
        decoder = DecoderConfig.from_dict({**config, "head_dim": rope_size})
        nope_size = positive_int(config, "qk_nope_head_dim")
        is_v3 = "DeepseekV3ForCausalLM" in (config.get("architectures") or ())
        scoring: Any = config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
        method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
        if (scoring, method) not in _ROUTING:
            known = " or ".join(f"{one!r} with {other!r}" for one, other in _ROUTING)
            raise UnsupportedConfigError(f"scoring_func is {scoring!r} with topk_method {method!r}: expected {known}.")
        if config.get("norm_topk_prob") and scoring == "softmax":
            raise UnsupportedConfigError(
                "norm_topk_prob is not supported with scoring_func 'softmax': set it to false."
            )
        if int(config.get("moe_layer_freq") or 1) != 1:
            raise UnsupportedConfigError(f"moe_layer_freq must be 1, got {config['moe_layer_freq']}.")
        num_experts, top_k = positive_int(config, "n_routed_experts"), positive_int(config, "num_experts_per_tok")
        has_groups = method != "greedy"
        num_groups = positive_int(config, "n_group", 1) if has_groups else 1
        top_groups = positive_int(config, "topk_group", 1) if has_groups else 1
        if num_experts % num_groups or top_groups > num_groups or top_k > num_experts // num_groups * top_groups:
            raise ModelConfigError(
                f"{top_k} of {num_experts} experts cannot be chosen from {top_groups} of {num_groups} groups: check "
                "num_experts_per_tok, n_routed_experts, topk_group and n_group."
            )
        num_dense = int(config.get("first_k_dense_replace") or 0)
        q_rank = config.get("q_lora_rank")
        return cls(
            decoder=decoder,
            moe=MoeConfig(
                hidden_size=decoder.hidden_size,
                num_experts=num_experts,
                top_k=top_k,
                intermediate_size=positive_int(config, "moe_intermediate_size"),
                renormalize=scoring == "sigmoid" and bool(config.get("norm_topk_prob", True)),
                sparse_layers=tuple(i >= num_dense for i in range(decoder.num_hidden_layers)),
            ),
            q_rank=None if q_rank is None else positive_int(config, "q_lora_rank"),
            latent_size=positive_int(config, "kv_lora_rank"),
            nope_size=nope_size,
            value_size=positive_int(config, "v_head_dim"),
            scale=(nope_size + rope_size) ** -0.5 * _temperature(decoder.rope) ** 2,
            interleaved=bool(config.get("rope_interleave", True)),
            num_shared=int(config.get("n_shared_experts") or 0),
            scoring=scoring,
            has_bias=method == "noaux_tc",
            expert_scale=float(config.get("routed_scaling_factor", 1.0)),
            num_groups=num_groups,
            top_groups=top_groups,
            group_best=2 if method == "noaux_tc" else 1,
        )


_ROUTING = (("softmax", "greedy"), ("softmax", "group_limited_greedy"), ("sigmoid", "noaux_tc"))


def _temperature(rope: Mapping[str, Any]) -> float:
    """What YaRN multiplies queries and keys by beside the amplitude of cos and sin."""
    is_scaled = rope["rope_type"] == "yarn" and rope.get("mscale_all_dim")
    return yarn_magnitude(rope, "mscale_all_dim") if is_scaled else 1.0


class LatentAttention(nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
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

    def forward(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))) if self.has_q_latent else self.q_proj(x_TD)
        q_THE = q.view(x_TD.shape[0], -1, self.q_head_size)
        out_THV = mla_attention(
            q_THE, self.kv_a_proj_with_mqa(x_TD), self.kv_a_layernorm.weight, cos_TR, sin_TR, self.kv_b_proj.weight,
            cache, self.scale, eps=_LATENT_EPS, interleaved=self.interleaved,
        )  # fmt: skip
        return self.o_proj(out_THV.flatten(1))


class Router(nn.Module):
    """Logits of experts: [T, D] → [T, X]. No `nn.Linear`, because quantized checkpoints do not quantize it.

    e_score_correction_bias: float32 [X], None without one; added to scores for the choice only.
    """

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        num_experts = config.moe.num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.decoder.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts)) if config.has_bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight)


class DeepseekMoe(nn.Module):
    """The experts that the router chooses, and shared experts, which every token goes through."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config)
        self.experts = Experts(config.decoder, config.moe)
        if config.num_shared:
            size = config.moe.intermediate_size * config.num_shared
            self.shared_experts = GatedMlp(replace(config.decoder, intermediate_size=size))

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """residual + the sum of all experts. [T, D], [T, D] → [T, D]"""
        config = self.config
        if config.num_shared:
            residual_TD = residual_TD + self.shared_experts(x_TD)
        weights_TK, ids_TK = route(
            self.gate(x_TD), config.moe.top_k, scoring=config.scoring, renormalize=config.moe.renormalize,
            scale=config.expert_scale, bias_X=self.gate.e_score_correction_bias, num_groups=config.num_groups,
            top_groups=config.top_groups, group_best=config.group_best,
        )  # fmt: skip
        return residual_TD + self.experts(x_TD, ids_TK, weights_TK)


class DeepseekMoeLayer(LlamaDecoderLayer):
    def forward(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TR, sin_TR, cache)
        return self.mlp(self.post_attention_layernorm(x_TD), x_TD)


class DeepseekForCausalLM(LlamaForCausalLM):
    """As `LlamaForCausalLM`, with a latent cache [N, P, C + R] per layer."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(
            config.decoder,
            (
                DeepseekMoeLayer(config.decoder, LatentAttention(config), DeepseekMoe(config))
                if is_sparse
                else LlamaDecoderLayer(config.decoder, LatentAttention(config))
                for is_sparse in config.moe.sparse_layers
            ),
        )

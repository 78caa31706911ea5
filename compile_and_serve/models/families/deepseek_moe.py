"""DeepSeekMoE (arXiv:2401.06066, arXiv:2412.19437): layers with routed and shared experts, which GLM-4-MoE has too.

Shape legend: T tokens of the step, D hidden size, E size of cos and sin, X experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.step import KVCacheSpec, LatentCacheSpec
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError, positive_int
from compile_and_serve.models.families.llama import LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.families.moe import Experts, MoeConfig
from compile_and_serve.models.layers import GatedMlp

Routing = tuple[Literal["softmax", "sigmoid"], Literal["greedy", "group_limited_greedy", "noaux_tc"]]
ROUTINGS: tuple[Routing, ...] = (("softmax", "greedy"), ("softmax", "group_limited_greedy"), ("sigmoid", "noaux_tc"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekMoeConfig(MoeConfig):
    """The experts of a config.json.

    num_shared: number of shared experts, which are one MLP. has_bias: scores get a bias for the choice of experts. expert_scale: factor of
    the routed experts' sum. scoring, num_groups, top_groups, group_best: as in `cas::route`.
    """

    num_shared: int
    scoring: Literal["softmax", "sigmoid"]
    has_bias: bool
    expert_scale: float
    num_groups: int
    top_groups: int
    group_best: int

    @staticmethod
    def read(config: Mapping[str, Any], decoder: DecoderConfig, routing: Routing) -> DeepseekMoeConfig:
        """Read a config.json. routing: scoring_func and topk_method. Raises `ModelConfigError` for a missing or invalid value."""
        scoring, method = routing
        if config.get("norm_topk_prob") and scoring == "softmax":
            raise UnsupportedConfigError("norm_topk_prob is not supported with scoring_func 'softmax': set it to false.")
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
        return DeepseekMoeConfig(
            hidden_size=decoder.hidden_size,
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=positive_int(config, "moe_intermediate_size"),
            renormalize=scoring == "sigmoid" and bool(config.get("norm_topk_prob", True)),
            sparse_layers=tuple(i >= num_dense for i in range(decoder.num_hidden_layers)),
            num_shared=int(config.get("n_shared_experts") or 0),
            scoring=scoring,
            has_bias=method == "noaux_tc",
            expert_scale=float(config.get("routed_scaling_factor", 1.0)),
            num_groups=num_groups,
            top_groups=top_groups,
            group_best=2 if method == "noaux_tc" else 1,
        )


class DeepseekMoeModelConfig(Protocol):
    """A config.json of a family with these layers."""

    @property
    def decoder(self) -> DecoderConfig: ...

    @property
    def moe(self) -> DeepseekMoeConfig: ...

    @property
    def layer_cache(self) -> KVCacheSpec | LatentCacheSpec:
        """What each layer keeps."""
        ...

    def make_attention(self) -> nn.Module:
        """The attention of a layer: forward(x [T, D], cos [T, E], sin [T, E], the layer's cache) → [T, D]."""
        ...


class Router(nn.Module):
    """Logits of experts: [T, D] → [T, X]. No `nn.Linear`, because quantized checkpoints do not quantize it.

    e_score_correction_bias: float32 [X], None without one; added to scores for the choice only.
    """

    def __init__(self, config: DecoderConfig, moe: DeepseekMoeConfig) -> None:
        super().__init__()
        num_experts = moe.num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts)) if moe.has_bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight)


class DeepseekMoe(nn.Module):
    """The experts that the router chooses, and shared experts, which every token goes through."""

    def __init__(self, config: DecoderConfig, moe: DeepseekMoeConfig) -> None:
        super().__init__()
        self.config = moe
        self.gate = Router(config, moe)
        self.experts = Experts(config, moe)
        if moe.num_shared:
            size = moe.intermediate_size * moe.num_shared
            self.shared_experts = GatedMlp(replace(config, intermediate_size=size))

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """residual + the sum of all experts. [T, D], [T, D] → [T, D]"""
        config = self.config
        if config.num_shared:
            residual_TD = residual_TD + self.shared_experts(x_TD)
        weights_TK, ids_TK = route(
            self.gate(x_TD),
            config.top_k,
            scoring=config.scoring,
            renormalize=config.renormalize,
            scale=config.expert_scale,
            bias_X=self.gate.e_score_correction_bias,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_best=config.group_best,
        )
        return residual_TD + self.experts(x_TD, ids_TK, weights_TK)


class DeepseekMoeLayer(LlamaDecoderLayer):
    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TE, sin_TE, cache)
        return self.mlp(self.post_attention_layernorm(x_TD), x_TD)


class DeepseekMoeForCausalLM(LlamaForCausalLM):
    """As `LlamaForCausalLM`, with a cache per layer as `config.layer_cache` says."""

    def __init__(self, config: DeepseekMoeModelConfig) -> None:
        decoder, moe = config.decoder, config.moe
        super().__init__(
            decoder,
            (
                DeepseekMoeLayer(decoder, config.make_attention(), DeepseekMoe(decoder, moe))
                if is_sparse
                else LlamaDecoderLayer(decoder, config.make_attention())
                for is_sparse in moe.sparse_layers
            ),
        )

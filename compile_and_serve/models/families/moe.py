"""Decoders with mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE. They differ in attention and routing.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads in attention and experts per token in the MLP,
E head size, X experts. Views use -1 for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.step import KV_CACHES
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.layers import GatedMlp, apply_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The experts of a config.json.

    top_k: experts of a token. shared_intermediate_size: of the shared expert, 0 without one. renormalize: whether a token's weights add
    up to 1. sparse_layers: which layers have experts; the others have one MLP. clip_qkv: limit of attention's inputs (OLMoE).
    """

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    renormalize: bool = True
    sparse_layers: tuple[bool, ...]
    clip_qkv: float | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MoeConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        num_experts = positive_int(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
        top_k = positive_int(config, "num_experts_per_tok")
        if top_k > num_experts:
            raise ModelConfigError(f"num_experts_per_tok must be at most the number of experts, {num_experts}, got {top_k}.")
        is_mixtral = config.get("model_type") == "mixtral"
        if is_mixtral and config.get("sliding_window") is not None:
            raise ModelConfigError("sliding_window is not supported for Mixtral: set it to null in the model's config.")
        step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
        clip_qkv = config.get("clip_qkv")
        return cls(
            hidden_size=positive_int(config, "hidden_size"),
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=positive_int(config, "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"),
            shared_intermediate_size=int(config.get("shared_expert_intermediate_size") or 0),
            renormalize=is_mixtral or bool(config.get("norm_topk_prob", False)),
            sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(positive_int(config, "num_hidden_layers"))),
            clip_qkv=None if clip_qkv is None else float(clip_qkv),
        )


class Qwen2Attention(LlamaAttention):
    """Llama's attention with biases of the queries, keys and values only."""

    def __init__(self, config: DecoderConfig, group: str = KV_CACHES) -> None:
        super().__init__(config, group)
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size)
        self.k_proj = nn.Linear(config.hidden_size, kv_size)
        self.v_proj = nn.Linear(config.hidden_size, kv_size)


class OlmoeAttention(LlamaAttention):
    """Llama's attention with an RMSNorm over all queries together, and one over all keys."""

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


class Experts(nn.Module):
    """The gated MLPs of all experts, stacked; gate rows before up rows."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        hidden, features = config.hidden_size, moe.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, 2 * features, hidden))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, hidden, features))

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return experts(x_TD, ids_TK, weights_TK, self.gate_up_proj, self.down_proj)


class MoeMlp(nn.Module):
    """Each token goes through the top_k experts that the router gives the most weight. [T, D] → [T, D]"""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.top_k, self.renormalize = moe.top_k, moe.renormalize
        self.gate = nn.Linear(config.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(config, moe)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = route(self.gate(x_TD), self.top_k, renormalize=self.renormalize)
        return self.experts(x_TD, ids_TK, weights_TK)


class SharedMoeMlp(MoeMlp):
    """As `MoeMlp`, plus a shared expert with a gate of its own (Qwen2-MoE)."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__(config, moe)
        self.shared_expert = GatedMlp(replace(config, intermediate_size=moe.shared_intermediate_size, mlp_bias=False))
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        shared_TD = torch.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)
        return super().forward(x_TD) + shared_TD


class MoeForCausalLM(LlamaForCausalLM):
    """As `LlamaForCausalLM`. make_attention: makes the attention of a layer."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig, make_attention: Callable[[], nn.Module]) -> None:
        moe_mlp = SharedMoeMlp if moe.shared_intermediate_size else MoeMlp
        super().__init__(
            config,
            (LlamaDecoderLayer(config, make_attention(), moe_mlp(config, moe) if is_sparse else None) for is_sparse in moe.sparse_layers),
        )

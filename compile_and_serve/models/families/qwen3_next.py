"""Qwen3-Next and Qwen3.5 (text): three layers of Gated DeltaNet to each layer of attention with a gate; dense or with experts.
Their checkpoints have a layer for multi-token prediction, which transformers ignores.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads, E head size. Views use -1 for head counts, so that
sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.recurrent.layer_state import StatePart
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.gemma import GemmaNorm
from compile_and_serve.models.families.moe import MOE_TP_PLAN, MoeConfig, SharedMoeMlp, with_expert_parts
from compile_and_serve.models.hybrid import HybridConfig, hybrid_spec, layer_kinds
from compile_and_serve.models.layers import GatedMlp, RotaryEmbedding, apply_rope, inverse_frequencies
from compile_and_serve.models.recurrent_layers import DeltaNetConfig, GroupedProjectionDeltaNet, SplitProjectionDeltaNet
from compile_and_serve.models.spec import ModelSpec, ShardStyle, full_attention


class GatedAttention(nn.Module):
    """Attention whose output is multiplied by a sigmoid gate, which comes beside each query head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.scale = config.head_dim, config.head_dim**-0.5
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = GemmaNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = GemmaNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        num_tokens = x_TD.shape[0]
        q_THE, gate_THE = self.q_proj(x_TD).view(num_tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
        k_TKE = self.k_proj(x_TD).view(num_tokens, -1, self.head_dim)
        v_TKE = self.v_proj(x_TD).view(num_tokens, -1, self.head_dim)
        q_THE, k_TKE = apply_rope(self.q_norm(q_THE), cos_TE, sin_TE), apply_rope(self.k_norm(k_TKE), cos_TE, sin_TE)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale)
        return self.o_proj((out_THE * torch.sigmoid(gate_THE)).flatten(1))


class AttentionLayer(nn.Module):
    def __init__(self, config: DecoderConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TE, sin_TE, kv_cache)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class DeltaNetLayer(nn.Module):
    def __init__(self, config: DecoderConfig, linear_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = linear_attn
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, state: tuple[StatePart, ...]) -> torch.Tensor:
        x_TD = x_TD + self.linear_attn(self.input_layernorm(x_TD), state)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


def _decoder(config: Mapping[str, Any]) -> DecoderConfig:
    flat = {"partial_rotary_factor": 0.25, "intermediate_size": 1, **config}
    return DecoderConfig.from_dict(flat, default_head_dim=256, allows_partial_rope=True)


def _experts(config: Mapping[str, Any]) -> MoeConfig:
    return replace(MoeConfig.from_dict(config), renormalize=bool(config.get("norm_topk_prob", True)))


def _build(config: Mapping[str, Any], dtype: torch.dtype, mixer: Callable[[DeltaNetConfig], nn.Module], *, has_experts: bool) -> ModelSpec:
    if not has_experts:
        positive_int(config, "intermediate_size")
    decoder, moe = _decoder(config), _experts(config) if has_experts else None
    delta, num_layers = DeltaNetConfig.from_dict(config), decoder.num_hidden_layers
    interval = positive_int(config, "full_attention_interval", 4)
    types = config.get("layer_types") or ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    kinds = layer_kinds(types, num_layers, "linear_attention")

    def make_layer(number: int) -> nn.Module:
        mlp = SharedMoeMlp(decoder, moe) if moe is not None and moe.sparse_layers[number] else GatedMlp(decoder)
        return DeltaNetLayer(decoder, mixer(delta), mlp) if kinds[number] == "recurrent" else AttentionLayer(decoder, mlp)

    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=partial(GemmaNorm, decoder.hidden_size, decoder.rms_norm_eps))
    plan = MOE_TP_PLAN if has_experts else DECODER_TP_PLAN
    spec = hybrid_spec(hybrid, make_layer, delta.state(dtype), config, dtype, tp_plan=plan)
    spec = replace(spec, weight_map={**spec.weight_map, **dict.fromkeys(_mtp_tensors(config, has_experts=has_experts))})
    return with_expert_parts(spec, moe) if moe is not None else spec


def _mtp_tensors(config: Mapping[str, Any], *, has_experts: bool) -> list[str]:
    """Names of the tensors that the layer for multi-token prediction has in checkpoints, which only its drafter reads."""
    if _num_mtp_layers(config) != 1:
        return []
    spec = _build_mtp(config, torch.float32, has_experts=has_experts)
    return [*(name for name, _ in spec.module.named_parameters()), *spec.parts]


class MtpModel(nn.Module):
    """What checkpoints call `mtp`: a layer of attention over the embedding of a token and the target's hidden state before it."""

    def __init__(self, decoder: DecoderConfig, mlp: nn.Module) -> None:
        super().__init__()
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.embed_tokens = nn.Embedding(decoder.vocab_size, size)
        self.rotary_emb = RotaryEmbedding(decoder)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = GemmaNorm(size, eps), GemmaNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([AttentionLayer(decoder, mlp)])
        self.norm = GemmaNorm(size, eps)
        self.lm_head = nn.Linear(size, decoder.vocab_size, bias=False)


class MtpForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], hidden_states [T, D], kv_caches, logits_indices int64 [L]) → logits [L, V] and
    hidden states [L, D], from which further drafts go on.
    """

    def __init__(self, decoder: DecoderConfig, make_mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mtp = MtpModel(decoder, make_mlp())

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mtp = self.mtp
        embedded_TD, hidden_TD = mtp.pre_fc_norm_embedding(mtp.embed_tokens(input_ids)), mtp.pre_fc_norm_hidden(hidden_states)
        x_TD = mtp.fc(torch.cat((embedded_TD, hidden_TD), dim=-1))
        cos_TE, sin_TE = mtp.rotary_emb(positions, x_TD.dtype)
        hidden_LD = mtp.norm(mtp.layers[0](x_TD, cos_TE, sin_TE, kv_caches[0])[logits_indices])
        return mtp.lm_head(hidden_LD), hidden_LD


def _num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Qwen3-Next's configs do not say that there is one."""
    return int(config.get("mtp_num_hidden_layers", 1))


def _build_mtp(config: Mapping[str, Any], dtype: torch.dtype, *, has_experts: bool) -> ModelSpec:
    if _num_mtp_layers(config) != 1:
        raise ModelConfigError(f"mtp_num_hidden_layers must be 1, got {config['mtp_num_hidden_layers']}.")
    decoder, moe = _decoder(config), _experts(config) if has_experts else None

    def make() -> nn.Module:
        return MtpForCausalLM(decoder, lambda: SharedMoeMlp(decoder, moe) if moe is not None else GatedMlp(decoder))

    plan: dict[str, ShardStyle] = {
        name.replace("model.layers", "mtp.layers"): style for name, style in MOE_TP_PLAN.items() if name.startswith("model.layers")
    }
    plan |= {"mtp.embed_tokens": "vocab", "mtp.lm_head": "vocab"}
    state = full_attention([KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim)])
    spec = decoder_spec(make, decoder, config, dtype, state=[state], tp_plan=plan)
    if moe is not None:
        spec = with_expert_parts(spec, replace(moe, sparse_layers=(True,)), base="mtp.layers")
    return replace(spec, buffers={"mtp.rotary_emb.inv_freq": inverse_frequencies(decoder.rope, decoder.rope_size)})


def build_mtp_layer(config: Mapping[str, Any], dtype: torch.dtype, number: int, is_only: bool) -> ModelSpec:
    return _build_mtp(config, dtype, has_experts=False)


def build_moe_mtp_layer(config: Mapping[str, Any], dtype: torch.dtype, number: int, is_only: bool) -> ModelSpec:
    return _build_mtp(config, dtype, has_experts=True)


def build_next(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return _build(config, dtype, GroupedProjectionDeltaNet, has_experts=True)


def build_3_5(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return _build(config, dtype, SplitProjectionDeltaNet, has_experts=False)


def build_3_5_moe(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return _build(config, dtype, SplitProjectionDeltaNet, has_experts=True)


for _name, _builder, _has_experts in (
    ("Qwen3NextForCausalLM", build_next, True),
    ("Qwen3_5ForCausalLM", build_3_5, False),
    ("Qwen3_5MoeForCausalLM", build_3_5_moe, True),
):
    register_model(
        _name,
        _builder,
        features=("full attention", "Gated DeltaNet", *(["experts"] if _has_experts else [])),
        build_mtp_layer=build_moe_mtp_layer if _has_experts else build_mtp_layer,
        num_mtp_layers=_num_mtp_layers,
    )

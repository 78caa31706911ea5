"""Kimi-Linear (arXiv:2510.26692): Kimi Delta Attention, and now and then latent attention without RoPE; with experts.

Shape legend: T tokens of the step, D hidden size, H heads, K head size, C channels of the convolution, R size of latent attention's
shared key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.mesh import ColwisePart, ColwiseParts
from compile_and_serve.custom_ops.recurrent.layer_state import StatePart
from compile_and_serve.custom_ops.recurrent.linear_attention import linear_attention
from compile_and_serve.custom_ops.state.tokens import LatentCacheSpec
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.deepseek import LatentAttention, LatentAttentionConfig
from compile_and_serve.models.families.deepseek_moe import DEEPSEEK_TP_PLAN, DeepseekMoe, DeepseekMoeConfig, widen_choice_biases
from compile_and_serve.models.families.moe import ExpertNames, with_expert_parts
from compile_and_serve.models.hybrid import HybridConfig, LayerKind, hybrid_spec, layer_kinds
from compile_and_serve.models.layers import GatedMlp
from compile_and_serve.models.recurrent_layers import DeltaNetConfig, GatedNorm, SplitConvolution, convolve, unit_length
from compile_and_serve.models.spec import ModelSpec, ShardedModule, ShardStyle

# What published files call a field of transformers' config class.
_PUBLISHED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


class KimiDeltaAttention(ShardedModule):
    """A Gated DeltaNet whose decay differs by channel of the key. [T, D] → [T, D]"""

    def __init__(self, config: DeltaNetConfig) -> None:
        super().__init__()
        self.config, self.head_dim, hidden, size = config, config.key_dim, config.hidden_size, config.keys_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, size, bias=False) for _ in range(3))
        self.conv1d = SplitConvolution((size,) * 3, config.width)
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, size, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(size))
        self.A_log = nn.Parameter(torch.empty(1, 1, config.num_heads, 1))
        self.b_proj = nn.Linear(hidden, config.num_heads, bias=False)
        self.g_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.g_b_proj = nn.Linear(self.head_dim, size, bias=False)
        self.o_norm = GatedNorm(self.head_dim, config.eps, torch.sigmoid)
        self.o_proj = nn.Linear(size, hidden, bias=False)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        heads = ColwiseParts((ColwisePart(self.config.keys_size, self.config.num_heads),))
        of_heads = dict.fromkeys(("q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj"), heads)
        return {**of_heads, "b_proj": "colwise", "o_proj": "rowwise"}

    def forward(self, x_TD: torch.Tensor, state: Sequence[StatePart]) -> torch.Tensor:
        qkv_TC = torch.cat((self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)), dim=-1)
        parts = convolve(self.conv1d, qkv_TC, state[0]).chunk(3, dim=-1)
        q_THK, k_THK, v_THK = (F.silu(part).unflatten(-1, (-1, self.head_dim)) for part in parts)
        q_THK, k_THK = unit_length(q_THK, self.head_dim**-0.5), unit_length(k_THK)
        dt_THK = (self.f_b_proj(self.f_a_proj(x_TD)).float() + self.dt_bias.float()).unflatten(-1, (-1, self.head_dim))
        log_decay_THK = -self.A_log.squeeze(0).float().exp() * F.softplus(dt_THK)
        out_THK = linear_attention(q_THK, k_THK, v_THK, log_decay_THK, self.b_proj(x_TD).sigmoid().float(), state[1:])
        gate_THK = self.g_b_proj(self.g_a_proj(x_TD)).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.o_norm(out_THK, gate_THK).flatten(1))


class UnrotatedAttention(LatentAttention):
    """Latent attention without RoPE."""

    def forward(self, x_TD: torch.Tensor, cos_TR: None, sin_TR: None, cache: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        shape = x_TD.shape[0], self.kv_a_proj_with_mqa.out_features - self.kv_a_layernorm.weight.shape[0]
        return super().forward(x_TD, x_TD.new_ones(shape), x_TD.new_zeros(shape), cache)


class KimiLayer(nn.Module):
    def __init__(self, config: DecoderConfig, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = mixer
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = mlp
        self.recurrent, self.sparse = isinstance(mixer, KimiDeltaAttention), isinstance(mlp, DeepseekMoe)

    def forward(self, x_TD: torch.Tensor, cos_TE: None, sin_TE: None, kept: Any) -> torch.Tensor:
        y_TD = self.input_layernorm(x_TD)
        x_TD = x_TD + (self.self_attn(y_TD, kept) if self.recurrent else self.self_attn(y_TD, cos_TE, sin_TE, kept))
        y_TD = self.post_attention_layernorm(x_TD)
        return self.mlp(y_TD, x_TD) if self.sparse else x_TD + self.mlp(y_TD)


def _kinds(config: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    linear = config.get("linear_attn_config") or {}
    if config.get("layer_types"):
        types = config["layer_types"]
    elif "full_attn_layers" in linear:  # which count from 1
        types = ["full_attention" if i + 1 in linear["full_attn_layers"] else "linear_attention" for i in range(num_layers)]
    else:
        types = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]
    return layer_kinds(types, num_layers, "linear_attention")


def _experts(config: Mapping[str, Any], decoder: DecoderConfig) -> DeepseekMoeConfig:
    routing = config.get("moe_router_activation_func", "sigmoid")
    if routing != "sigmoid":
        raise UnsupportedConfigError(f"moe_router_activation_func must be 'sigmoid', got {routing!r}.")
    defaults = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "first_k_dense_replace": 1}
    moe = DeepseekMoeConfig.read({**defaults, "n_shared_experts": 1, **config}, decoder, ("sigmoid", "noaux_tc"))
    types = config.get("mlp_layer_types")
    if types is None:
        return moe
    if len(types) != decoder.num_hidden_layers or not set(types) <= {"dense", "sparse"}:
        raise ModelConfigError(f"mlp_layer_types must be {decoder.num_hidden_layers} times 'dense' or 'sparse', got {types}.")
    return replace(moe, sparse_layers=tuple(kind == "sparse" for kind in types))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    if not config.get("mla_use_nope", True):
        raise UnsupportedConfigError("mla_use_nope must be true: the model's latent attention has no RoPE here.")
    published = {ours: config[theirs] for ours, theirs in _PUBLISHED.items() if config.get(theirs) is not None}
    known = {"max_position_embeddings": 1 << 20, "routed_scaling_factor": 2.446, **published, **config}
    shared_key, nope = positive_int(config, "qk_rope_head_dim", 64), positive_int(config, "qk_nope_head_dim", 128)
    decoder = DecoderConfig.from_dict({"rms_norm_eps": 1e-5, **known, "head_dim": shared_key})
    kinds, moe = _kinds(config, decoder.num_hidden_layers), _experts(known, decoder)
    latent = LatentAttentionConfig(
        decoder=decoder,
        q_rank=None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank"),
        latent_size=positive_int(config, "kv_lora_rank", 512),
        nope_size=nope,
        value_size=positive_int(config, "v_head_dim", 128),
        scale=(nope + shared_key) ** -0.5,
        interleaved=False,
    )
    linear = config.get("linear_attn_config") or {}
    sizes = {
        "num_heads": linear.get("num_heads", config.get("linear_num_heads", 32)),
        "head_dim": linear.get("head_dim", config.get("linear_head_dim", 128)),
        "width": linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
    }
    delta = DeltaNetConfig(
        hidden_size=decoder.hidden_size,
        num_key_heads=positive_int(sizes, "num_heads"),
        num_heads=positive_int(sizes, "num_heads"),
        key_dim=positive_int(sizes, "head_dim"),
        value_dim=positive_int(sizes, "head_dim"),
        width=positive_int(sizes, "width"),
        eps=decoder.rms_norm_eps,
        decay_per_channel=True,
    )

    def make_layer(index: int) -> nn.Module:
        mixer = KimiDeltaAttention(delta) if kinds[index] == "recurrent" else UnrotatedAttention(latent)
        return KimiLayer(decoder, mixer, DeepseekMoe(decoder, moe) if moe.sparse_layers[index] else GatedMlp(decoder))

    norm = partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, has_rope=False)
    names = {
        "self_attn.conv1d.": "self_attn.",
        "mlp.gate.": "block_sparse_moe.gate.",
        "mlp.shared_experts.": "block_sparse_moe.shared_experts.",
    }
    cache = LatentCacheSpec(latent_size=latent.latent_size, rope_size=shared_key)
    plan = _tp_plan(kinds)
    spec = hybrid_spec(hybrid, make_layer, delta.state(dtype), config, dtype, tp_plan=plan, names=names, cache=cache)
    widen_choice_biases(spec.module)
    # transformers gives the MLPs of all layers the name of experts when it writes a checkpoint.
    dense = tuple(f"model.layers.{i}.mlp." for i, is_sparse in enumerate(moe.sparse_layers) if not is_sparse)
    written = {name.replace("mlp.", "block_sparse_moe."): name for name, _ in spec.module.named_parameters() if name.startswith(dense)}
    spec = replace(spec, weight_map={**spec.weight_map, **written})
    return with_expert_parts(spec, moe, ExpertNames(gate="w1", up="w3", down="w2", block="block_sparse_moe"))


def _tp_plan(kinds: Sequence[LayerKind]) -> dict[str, ShardStyle]:
    """DeepSeek's plan; its projections of attention in layers with attention only, since those of other mixers have the same names."""
    plan: dict[str, ShardStyle] = {}
    for name, style in DEEPSEEK_TP_PLAN.items():
        if "self_attn" in name:
            plan |= {name.replace("*", str(i), 1): style for i, kind in enumerate(kinds) if kind == "attention"}
        else:
            plan[name] = style
    return plan


register_model("KimiLinearForCausalLM", build, features=("latent attention", "Kimi Delta Attention", "experts"))

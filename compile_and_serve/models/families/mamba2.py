"""Mamba-2, and hybrids of it: Bamba, Granite 4 and Falcon-H1.

Shape legend: T tokens of the step, D hidden size, E head size.
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
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.moe import MOE_TP_PLAN, MoeConfig, MoeMlp
from compile_and_serve.models.hybrid import HybridAttention, HybridConfig, LayerKind, hybrid_spec, layer_kinds
from compile_and_serve.models.layers import GatedMlp
from compile_and_serve.models.recurrent_layers import Mamba2Config, Mamba2Mixer, time_limits
from compile_and_serve.models.spec import ModelSpec, ShardedModule, ShardStyle

MAX_LENGTH = 1 << 15  # of models that set no limit


class Mamba2Layer(nn.Module):
    """x + mixer(norm(x)). wide_residual: x is in float32 from layer to layer."""

    def __init__(self, mixer: nn.Module, hidden_size: int, eps: float, dtype: torch.dtype, *, wide_residual: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.mixer = mixer
        self.dtype, self.wide_residual = dtype, wide_residual

    def forward(self, x_TD: torch.Tensor, cos_TE: None, sin_TE: None, state: Sequence[StatePart]) -> torch.Tensor:
        mixed_TD = self.mixer(self.norm(x_TD.to(self.dtype)), state)
        return (x_TD.float() if self.wide_residual else x_TD) + mixed_TD


def _mixer_config(config: Mapping[str, Any], hidden_size: int, eps: float, **changes: Any) -> Mamba2Config:
    """Of a config.json with names that begin with `mamba_`."""
    num_heads = positive_int(config, "mamba_n_heads", 128)
    inner = config.get("mamba_d_ssm") or positive_int(config, "mamba_expand", 2) * hidden_size
    head_dim = config.get("mamba_d_head", "auto")
    num_groups = positive_int(config, "mamba_n_groups", 1)
    made = Mamba2Config(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=inner // num_heads if head_dim == "auto" else int(head_dim),
        num_groups=num_groups,
        state_size=positive_int(config, "mamba_d_state", 256),
        width=positive_int(config, "mamba_d_conv", 4),
        eps=eps,
        has_bias=bool(config.get("mamba_proj_bias", False)),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        time_limits=time_limits(config),
        **{"norm_groups": num_groups, **changes},
    )
    if made.inner_size != inner:
        raise ModelConfigError(f"mamba_n_heads times mamba_d_head must be {inner}, got {made.num_heads} times {made.head_dim}.")
    return made


def build_mamba2(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    eps = float(config.get("layer_norm_epsilon", 1e-5))
    known = {"intermediate_size": 1, "num_attention_heads": 1, "max_position_embeddings": MAX_LENGTH, "rms_norm_eps": eps, **config}
    decoder = DecoderConfig.from_dict(known)
    num_groups = positive_int(config, "n_groups", 8)
    mixer = Mamba2Config(
        hidden_size=decoder.hidden_size,
        num_heads=positive_int(config, "num_heads", 128),
        head_dim=positive_int(config, "head_dim", 64),
        num_groups=num_groups,
        norm_groups=num_groups,
        state_size=positive_int(config, "state_size", 128),
        width=positive_int(config, "conv_kernel", 4),
        eps=eps,
        has_bias=bool(config.get("use_bias", False)),
        has_conv_bias=bool(config.get("use_conv_bias", True)),
        time_limits=time_limits(config),
    )
    wide = bool(config.get("residual_in_fp32", True))

    def make_layer(number: int) -> nn.Module:
        return Mamba2Layer(Mamba2Mixer(mixer), decoder.hidden_size, eps, dtype, wide_residual=wide)

    every: LayerKind = "recurrent"
    hybrid = HybridConfig(
        decoder=decoder,
        kinds=(every,) * decoder.num_hidden_layers,
        norm=partial(FinalNorm, decoder.hidden_size, eps, dtype),
        has_rope=False,
        norm_name="norm_f",
    )
    names = {"model.embed_tokens": "model.embeddings", "model.": "backbone."}
    return hybrid_spec(hybrid, make_layer, mixer.state(dtype), config, dtype, names=names)


class FinalNorm(nn.RMSNorm):
    """RMSNorm with a result in the model's dtype, whatever the residual's."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, eps=eps)
        self.model_dtype = dtype

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TD.to(self.model_dtype))


class HybridLayer(nn.Module):
    """A mixer and an MLP, each with a norm before it. residual_scale: a factor of what each adds."""

    def __init__(self, config: DecoderConfig, mixer: nn.Module, mlp: nn.Module, *, recurrent: bool, residual_scale: float = 1.0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer_name = "mamba" if recurrent else "self_attn"  # as checkpoints have it
        self.add_module(self.mixer_name, mixer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = mlp
        self.recurrent, self.residual_scale = recurrent, residual_scale

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor | None, sin_TE: torch.Tensor | None, kept: Any) -> torch.Tensor:
        y_TD = self.input_layernorm(x_TD)
        mixer = self.get_submodule(self.mixer_name)
        x_TD = x_TD + self._scaled(mixer(y_TD, kept) if self.recurrent else mixer(y_TD, cos_TE, sin_TE, kept))
        return x_TD + self._scaled(self.mlp(self.post_attention_layernorm(x_TD)))

    def _scaled(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


def build_bamba(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    known = {"rms_norm_eps": 1e-5, "max_position_embeddings": 262144, **config, "partial_rotary_factor": 0.5}
    decoder = DecoderConfig.from_dict(known, allows_partial_rope=True)
    mixer = _mixer_config(config, decoder.hidden_size, decoder.rms_norm_eps)
    attending = config.get("attn_layer_indices") or ()
    kinds: tuple[LayerKind, ...] = tuple("attention" if i in attending else "recurrent" for i in range(decoder.num_hidden_layers))

    def make_layer(number: int) -> nn.Module:
        recurrent = kinds[number] == "recurrent"
        return HybridLayer(decoder, Mamba2Mixer(mixer) if recurrent else HybridAttention(decoder), GatedMlp(decoder), recurrent=recurrent)

    norm = partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, norm_name="final_layernorm")
    names = {"post_attention_layernorm": "pre_ff_layernorm", ".mlp.": ".feed_forward."}
    return hybrid_spec(hybrid, make_layer, mixer.state(dtype), config, dtype, names=names)


class MergedMlp(ShardedModule):
    """The gated MLP of Granite 4, whose first two projections are one tensor."""

    def __init__(self, hidden_size: int, features: int) -> None:
        super().__init__()
        self.input_linear = nn.Linear(hidden_size, 2 * features, bias=False)
        self.output_linear = nn.Linear(features, hidden_size, bias=False)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        features = self.output_linear.in_features
        return {"input_linear": ColwiseParts((ColwisePart(features, features),) * 2), "output_linear": "rowwise"}

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = self.input_linear(x_TD).chunk(2, dim=-1)
        return self.output_linear(F.silu(gate) * up)


class GraniteMlp(nn.Module):
    """A shared MLP, and experts beside it if there are any."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig | None, shared_features: int) -> None:
        super().__init__()
        self.shared_mlp = MergedMlp(config.hidden_size, shared_features)
        self.routed = MoeMlp(config, moe) if moe is not None else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        shared_TD = self.shared_mlp(x_TD)
        return shared_TD if self.routed is None else self.routed(x_TD) + shared_TD


def build_granite(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = DecoderConfig.from_dict(config)
    mixer = _mixer_config(config, decoder.hidden_size, decoder.rms_norm_eps)
    num_layers, has_experts = decoder.num_hidden_layers, config.get("num_local_experts", 8) > 0
    types = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * num_layers
    kinds = layer_kinds(["mamba" if kind == "linear_attention" else kind for kind in types], num_layers, "mamba")
    moe = replace(MoeConfig.from_dict({"num_experts_per_tok": 2, **config}), renormalize=True) if has_experts else None
    residual_scale = float(config.get("residual_multiplier", 1.0))
    scale = float(config.get("attention_multiplier", 1.0))

    def make_layer(number: int) -> nn.Module:
        recurrent = kinds[number] == "recurrent"
        kept = Mamba2Mixer(mixer) if recurrent else HybridAttention(decoder, scale)
        mlp = GraniteMlp(decoder, moe, positive_int(config, "shared_intermediate_size", 1024))
        return HybridLayer(decoder, kept, mlp, recurrent=recurrent, residual_scale=residual_scale)

    hybrid = HybridConfig(
        decoder=decoder,
        kinds=kinds,
        norm=partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps),
        has_rope=config.get("position_embedding_type") == "rope",
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        logits_scale=1.0 / float(config.get("logits_scaling", 1.0)),
    )
    plan = {**MOE_TP_PLAN, "model.layers.*.mlp.routed.experts": "experts"} if has_experts else MOE_TP_PLAN
    names = {
        "mlp.shared_mlp": "shared_mlp",
        "mlp.routed.gate.weight": "block_sparse_moe.router.layer.weight",
        "mlp.routed.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "mlp.routed.experts.down_proj": "block_sparse_moe.output_linear.weight",
    }
    return hybrid_spec(hybrid, make_layer, mixer.state(dtype), config, dtype, tp_plan=plan, names=names)


class ScaledMlp(nn.Module):
    """down(silu(gate(x) · scale) · up(x)) · scale (Falcon-H1)."""

    def __init__(self, config: DecoderConfig, gate_scale: float, down_scale: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.gate_scale, self.down_scale = gate_scale, down_scale

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x_TD) * F.silu(self.gate_proj(x_TD) * self.gate_scale)) * self.down_scale


class FalconH1Layer(nn.Module):
    """Mamba-2 and attention side by side, each with factors of its input and output."""

    def __init__(self, decoder: DecoderConfig, mixer: Mamba2Config, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.mamba = Mamba2Mixer(mixer, config.get("ssm_multipliers") or [1.0] * 5)
        self.self_attn = HybridAttention(decoder, key_scale=float(config.get("key_multiplier", 1.0)))
        self.post_attention_layernorm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.mlp = ScaledMlp(decoder, *(config.get("mlp_multipliers") or (1.0, 1.0)))
        names = ("ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier")
        self.ssm_in, self.ssm_out, self.attention_in, self.attention_out = (float(config.get(name, 1.0)) for name in names)

    def forward(
        self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor, state: Sequence[StatePart]
    ) -> torch.Tensor:
        y_TD = self.input_layernorm(x_TD)
        mixed_TD = self.mamba(y_TD * self.ssm_in, state) * self.ssm_out
        attended_TD = self.self_attn(y_TD * self.attention_in, cos_TE, sin_TE, kv_cache) * self.attention_out
        x_TD = x_TD + (mixed_TD + attended_TD)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


def build_falcon_h1(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = DecoderConfig.from_dict({"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, **config})
    norm_groups = positive_int(config, "mamba_n_groups", 1) if config.get("mamba_rms_norm") else 0
    gates_first = not config.get("mamba_norm_before_gate", True)
    mixer = _mixer_config(config, decoder.hidden_size, decoder.rms_norm_eps, norm_groups=norm_groups, gates_first=gates_first)
    every: LayerKind = "both"
    hybrid = HybridConfig(
        decoder=decoder,
        kinds=(every,) * decoder.num_hidden_layers,
        norm=partial(nn.RMSNorm, decoder.hidden_size, eps=decoder.rms_norm_eps),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        logits_scale=float(config.get("lm_head_multiplier", 1.0)),
        norm_name="final_layernorm",
    )
    names = {"post_attention_layernorm": "pre_ff_layernorm", ".mlp.": ".feed_forward."}
    return hybrid_spec(hybrid, lambda number: FalconH1Layer(decoder, mixer, config), mixer.state(dtype), config, dtype, names=names)


register_model("Mamba2ForCausalLM", build_mamba2, features=("Mamba-2",))
register_model("BambaForCausalLM", build_bamba, features=("full attention", "Mamba-2"))
register_model("GraniteMoeHybridForCausalLM", build_granite, features=("full attention", "Mamba-2", "experts"))
register_model("FalconH1ForCausalLM", build_falcon_h1, features=("full attention", "Mamba-2"))

"""Nemotron-H (arXiv:2504.03624): each layer is Mamba-2, attention, an MLP or experts; the MLPs and experts have no gate.

Shape legend: T tokens of the step, D hidden size, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.mesh import ColwiseParts
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.models.config import DecoderConfig, UnsupportedConfigError, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.deepseek_moe import DeepseekMoeConfig, Router, choose_experts, widen_choice_biases
from compile_and_serve.models.hybrid import HybridAttention, HybridConfig, LayerKind, hybrid_spec
from compile_and_serve.models.recurrent_layers import Mamba2Config, Mamba2Mixer, time_limits
from compile_and_serve.models.spec import ModelSpec, ShardedModule, ShardStyle, TensorPart

# A config.json's words, and letters of its pattern → the mixer.
_MIXERS: Mapping[str, str] = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}
_KINDS: Mapping[str, LayerKind] = {"mamba": "recurrent", "attention": "attention", "mlp": "neither", "moe": "neither"}


class SquaredReluMlp(ShardedModule):
    """down(relu(up(x))²). [T, D] → [T, D]"""

    def __init__(self, config: DecoderConfig, features: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, features, bias=config.mlp_bias)
        self.down_proj = nn.Linear(features, config.hidden_size, bias=config.mlp_bias)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        return {"up_proj": "colwise", "down_proj": "rowwise"}

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(x_TD)).square())


@dataclass(frozen=True, kw_only=True, slots=True)
class NemotronMoeConfig(DeepseekMoeConfig):
    """shared_size: features of the shared expert. latent_size: of what the routed experts take and give; None: the hidden size."""

    shared_size: int
    latent_size: int | None

    @staticmethod
    def from_config(config: Mapping[str, Any], decoder: DecoderConfig) -> NemotronMoeConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        defaults = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
        read = DeepseekMoeConfig.read({**defaults, **config, "first_k_dense_replace": 0}, decoder, ("sigmoid", "noaux_tc"))
        return NemotronMoeConfig(
            **{one.name: getattr(read, one.name) for one in fields(read)},
            shared_size=positive_int(config, "moe_shared_expert_intermediate_size", 7688),
            latent_size=None if config.get("moe_latent_size") is None else positive_int(config, "moe_latent_size"),
        )


class SquaredReluExperts(nn.Module):
    """The MLPs of all experts, stacked."""

    def __init__(self, moe: NemotronMoeConfig) -> None:
        super().__init__()
        size = moe.latent_size or moe.hidden_size
        self.up_proj = nn.Parameter(torch.empty(moe.num_experts, moe.intermediate_size, size))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, size, moe.intermediate_size))

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return experts(x_TD, ids_TK, weights_TK, self.up_proj, self.down_proj, activation="relu2")


class NemotronMoe(ShardedModule):
    """The experts that the router chooses, and a shared one. [T, D] → [T, D]"""

    def __init__(self, config: DecoderConfig, moe: NemotronMoeConfig) -> None:
        super().__init__()
        self.config = moe
        self.gate = Router(config, moe)
        self.experts = SquaredReluExperts(moe)
        self.shared_experts = SquaredReluMlp(config, moe.shared_size)
        if moe.latent_size is not None:
            self.fc1_latent_proj = nn.Linear(config.hidden_size, moe.latent_size, bias=config.mlp_bias)
            self.fc2_latent_proj = nn.Linear(moe.latent_size, config.hidden_size, bias=config.mlp_bias)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        return {"experts": "experts"}

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = choose_experts(self.gate, x_TD, self.config)
        if self.config.latent_size is None:
            return self.experts(x_TD, ids_TK, weights_TK) + self.shared_experts(x_TD)
        return self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x_TD), ids_TK, weights_TK)) + self.shared_experts(x_TD)


class NemotronLayer(nn.Module):
    """x + mixer(norm(x)), where the mixer is Mamba-2, attention, an MLP or experts."""

    def __init__(self, config: DecoderConfig, mixer: nn.Module, kind: LayerKind) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.kind = kind

    def forward(self, x_TD: torch.Tensor, cos_TE: None, sin_TE: None, *kept: Any) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        return x_TD + (self.mixer(y_TD, cos_TE, sin_TE, *kept) if self.kind == "attention" else self.mixer(y_TD, *kept))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    pattern = config.get("hybrid_override_pattern")
    words = config.get("layers_block_type") or config.get("layer_types") or pattern
    if not words or any(word not in _MIXERS for word in words):
        raise UnsupportedConfigError(f"The layers of a Nemotron-H must be Mamba-2, attention, an MLP or experts, got {words}.")
    mixers = [_MIXERS[word] for word in words]
    kinds = tuple(_KINDS[mixer] for mixer in mixers)
    eps = float(config.get("layer_norm_epsilon", config.get("rms_norm_eps", 1e-5)))
    activation = config.get("mlp_hidden_act", "relu2")
    if activation != "relu2":
        raise UnsupportedConfigError(f"mlp_hidden_act must be 'relu2', got {activation!r}.")
    known = {
        "head_dim": config.get("attention_head_dim", 128),
        "max_position_embeddings": 4096,
        **config,
        "rms_norm_eps": eps,
        "num_hidden_layers": len(kinds),
    }
    decoder = DecoderConfig.from_dict(known)
    groups = positive_int(config, "n_groups", 8)
    mixer = Mamba2Config(
        hidden_size=decoder.hidden_size,
        num_heads=positive_int(config, "mamba_num_heads", 128),
        head_dim=positive_int(config, "mamba_head_dim", 64),
        num_groups=groups,
        state_size=positive_int(config, "ssm_state_size", 128),
        width=positive_int(config, "conv_kernel", 4),
        eps=eps,
        has_bias=bool(config.get("use_bias", False)),
        has_conv_bias=bool(config.get("use_conv_bias", True)),
        norm_groups=groups,
        time_limits=time_limits(config),
    )

    moe = NemotronMoeConfig.from_config(config, decoder) if "moe" in mixers else None

    def make_layer(number: int) -> nn.Module:
        made: nn.Module
        if mixers[number] == "mamba":
            made = Mamba2Mixer(mixer)
        elif mixers[number] == "attention":
            made = HybridAttention(decoder)
        elif mixers[number] == "moe" and moe is not None:
            made = NemotronMoe(decoder, moe)
        else:
            made = SquaredReluMlp(decoder, decoder.intermediate_size)
        return NemotronLayer(decoder, made, kinds[number])

    norm = partial(nn.RMSNorm, decoder.hidden_size, eps=eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, has_rope=False, norm_name="norm_f")
    names = {"model.embed_tokens": "model.embeddings", "model.": "backbone."}
    spec = hybrid_spec(hybrid, make_layer, mixer.state(dtype), config, dtype, names=names)
    widen_choice_biases(spec.module)
    parts = _expert_parts(moe, [i for i, one in enumerate(mixers) if one == "moe"]) if moe is not None else {}
    return replace(spec, parts=parts)


def _expert_parts(moe: NemotronMoeConfig, layers: Sequence[int]) -> dict[str, TensorPart]:
    """Of checkpoints, which hold each linear of each expert as a tensor of its own."""
    rows = {"up_proj": moe.intermediate_size, "down_proj": moe.latent_size or moe.hidden_size}
    return {
        f"backbone.layers.{layer}.mixer.experts.{expert}.{leaf}.weight": TensorPart(
            parameter=f"model.layers.{layer}.mixer.experts.{leaf}", index=expert, first_row=0, num_rows=num_rows
        )
        for layer in layers
        for expert in range(moe.num_experts)
        for leaf, num_rows in rows.items()
    }


register_model("NemotronHForCausalLM", build, features=("full attention", "Mamba-2", "experts"))

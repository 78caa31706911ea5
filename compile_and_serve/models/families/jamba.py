"""Jamba (arXiv:2403.19887): Mamba and attention without positions, now and then with experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.models.config import DecoderConfig, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.mamba import MambaConfig, MambaMixer, dt_rank
from compile_and_serve.models.families.mamba2 import HybridLayer
from compile_and_serve.models.families.moe import MOE_TP_PLAN, ExpertNames, MoeConfig, MoeMlp, with_expert_parts
from compile_and_serve.models.hybrid import HybridAttention, HybridConfig, LayerKind, hybrid_spec
from compile_and_serve.models.layers import GatedMlp
from compile_and_serve.models.spec import ModelSpec


def _is_due(config: Mapping[str, Any], what: str, period: int, offset: int, number: int) -> bool:
    return number % positive_int(config, f"{what}_layer_period", period) == int(config.get(f"{what}_layer_offset", offset))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = DecoderConfig.from_dict({"max_position_embeddings": 262144, **config})
    numbers, size = range(decoder.num_hidden_layers), decoder.hidden_size
    kinds: tuple[LayerKind, ...] = tuple("attention" if _is_due(config, "attn", 8, 4, i) else "recurrent" for i in numbers)
    moe = None
    if positive_int(config, "num_experts", 16) > 1:
        sparse = tuple(_is_due(config, "expert", 2, 1, i) for i in numbers)
        moe = replace(MoeConfig.from_dict({"num_experts_per_tok": 2, "num_experts": 16, **config}), renormalize=False, sparse_layers=sparse)
    mixer = MambaConfig(
        hidden_size=size,
        inner_size=positive_int(config, "mamba_expand", 2) * size,
        state_size=positive_int(config, "mamba_d_state", 16),
        rank=dt_rank(config, "mamba_dt_rank", size),
        width=positive_int(config, "mamba_d_conv", 4),
        has_bias=bool(config.get("mamba_proj_bias", False)),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        norms="weighted",
        norm_eps=decoder.rms_norm_eps,
    )

    def make_layer(number: int) -> nn.Module:
        recurrent = kinds[number] == "recurrent"
        mlp = MoeMlp(decoder, moe) if moe is not None and moe.sparse_layers[number] else GatedMlp(decoder)
        return HybridLayer(decoder, MambaMixer(mixer) if recurrent else HybridAttention(decoder), mlp, recurrent=recurrent)

    norm = partial(nn.RMSNorm, size, eps=decoder.rms_norm_eps)
    hybrid = HybridConfig(decoder=decoder, kinds=kinds, norm=norm, has_rope=False, norm_name="final_layernorm")
    names = {"post_attention_layernorm": "pre_ff_layernorm", ".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."}
    plan = MOE_TP_PLAN
    spec = hybrid_spec(hybrid, make_layer, mixer.state(dtype), config, dtype, tp_plan=plan, names=names)
    return with_expert_parts(spec, moe, ExpertNames(block="feed_forward")) if moe is not None else spec


register_model("JambaForCausalLM", build, features=("full attention", "Mamba", "experts"))

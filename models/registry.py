"""From a checkpoint's config.json to a `ModelSpec`, by Hugging Face architecture name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.config import DecoderConfig, ModelConfigError
from models.layers import inverse_frequencies, max_positions
from models.llama import LlamaForCausalLM
from models.qwen3 import Qwen3ForCausalLM
from models.spec import KVCacheSpec, ModelSpec, ShardStyle

DECODER_TP_PLAN: Mapping[str, ShardStyle] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture: its module, and where its config's defaults differ from hidden_size / num_attention_heads."""

    module: Callable[[DecoderConfig], nn.Module]
    default_head_dim: int | None = None


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(module=LlamaForCausalLM),
    "Qwen3ForCausalLM": Family(module=Qwen3ForCausalLM, default_head_dim=128),
}


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype) -> ModelSpec:
    """Build the plain module of a config.json on the meta device, its parameters in `dtype`.

    Raises `ModelConfigError` for a config without an architecture, an unsupported one (naming those that are), or bad sizes.
    """
    architecture = architecture_of(config)
    family = ARCHITECTURES[architecture]
    decoder = DecoderConfig.from_dict(config, default_head_dim=family.default_head_dim)
    with torch.device("meta"):
        module = family.module(decoder)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.requires_grad_(False).eval()
    layers = range(decoder.num_hidden_layers)
    unused: dict[str, str | None] = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in layers}
    if decoder.tie_word_embeddings:
        unused["lm_head.weight"] = None
    return ModelSpec(
        module=module,
        config=config,
        kv_cache_specs=tuple(
            KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim) for _ in layers
        ),
        vocab_size=decoder.vocab_size,
        max_model_len=max_positions(decoder),
        weight_map=unused,
        tp_plan=DECODER_TP_PLAN,
        buffers={"model.rotary_emb.inv_freq": inverse_frequencies(decoder.rope, decoder.head_dim)},
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The supported architecture that a config.json names. Raises `ModelConfigError` otherwise."""
    names = config.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise ModelConfigError(
            f'The model\'s config names no architecture: expected "architectures" to be one of {supported}.'
        )
    if names[0] not in ARCHITECTURES:
        raise ModelConfigError(f"Architecture {names[0]!r} is not supported: supported are {supported}.")
    return names[0]

"""Builds a `ModelSpec` from a checkpoint's config.json, by Hugging Face architecture name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.step import KVCacheSpec
from compile_and_serve.models.config import DecoderConfig, ModelConfigError
from compile_and_serve.models.layers import inverse_frequencies, max_positions
from compile_and_serve.models.llama import LlamaForCausalLM
from compile_and_serve.models.quantization_config import quantized_weights
from compile_and_serve.models.qwen3 import Qwen3ForCausalLM
from compile_and_serve.models.spec import ModelSpec, ShardStyle, full_attention

log = logging.getLogger(__name__)

ModelImpl = Literal["auto", "transformers"]

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
    """One architecture: its module class and its config's defaults.

    default_head_dim: None means hidden_size / num_attention_heads.
    """

    module: Callable[[DecoderConfig], nn.Module]
    default_head_dim: int | None = None


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(module=LlamaForCausalLM),
    "Qwen3ForCausalLM": Family(module=Qwen3ForCausalLM, default_head_dim=128),
}


ModelBuilder = Callable[[Mapping[str, Any], torch.dtype], ModelSpec]
_BUILDERS: dict[str, ModelBuilder] = {}


def register_model(architecture: str, build: ModelBuilder) -> None:
    """Have `build(config.json as a dictionary, dtype)` make the models of an architecture. It comes before our own families."""
    _BUILDERS[architecture] = build


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype, model_impl: ModelImpl = "auto") -> ModelSpec:
    """Build the module of a config.json on the meta device, with its parameters in `dtype`.

    model_impl: "transformers" uses the transformers package's class; "auto" does so only without a native implementation.
    Raises `ModelConfigError` for a config without an architecture, an unsupported architecture, invalid sizes, or an
    unsupported quantization.
    """
    architecture = architecture_of(config)
    if architecture in _BUILDERS:
        return _BUILDERS[architecture](config, dtype)
    if model_impl == "transformers" or architecture not in ARCHITECTURES:
        spec = _build_with_transformers(config, architecture, dtype)
    else:
        spec = _build_native(config, architecture, dtype)
    return replace(spec, quantized_weights=quantized_weights(config, spec.module))


def _build_native(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> ModelSpec:
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
        state=(
            full_attention(
                KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim) for _ in layers
            ),
        ),
        vocab_size=decoder.vocab_size,
        max_model_len=max_positions(decoder),
        weight_map=unused,
        tp_plan=DECODER_TP_PLAN,
        buffers={"model.rotary_emb.inv_freq": inverse_frequencies(decoder.rope, decoder.head_dim)},
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names. Raises `ModelConfigError` if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelConfigError(
            'The model\'s config names no architecture: expected "architectures" to be one of '
            f"{', '.join(ARCHITECTURES)}, or another decoder of the transformers package."
        )
    return names[0]


def _build_with_transformers(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> ModelSpec:
    # Imported here because importing transformers takes seconds.
    from compile_and_serve.models.transformers_model import build_transformers_model

    try:
        spec = build_transformers_model(config, dtype=dtype)
    except ModelConfigError as error:
        if architecture in ARCHITECTURES:
            raise
        raise ModelConfigError(f"{error} Native architectures: {', '.join(ARCHITECTURES)}.") from error
    log.info("%s runs in the transformers package's implementation.", architecture)
    return spec

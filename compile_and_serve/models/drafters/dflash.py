"""DFlash block drafters (arXiv:2602.06036): a few decoder layers that draft a block of tokens in one pass.

Shape legend: T tokens, F features of the target's hidden states, D hidden size, K key/value heads, E head size.

A block is the last token of a sequence, and a mask token for each draft. Attention in the block is not causal: each token reads all of it.
Before the block, it reads the context: keys and values that are made from the target's hidden states.

So the drafter has two models over one KV cache. A Qwen3 decoder computes blocks, and `DFlashContext` writes the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.step import POSITIONS, TOKENS, StepOutput
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.drafters.drafter_spec import EMBEDDING, HEAD, DrafterSpec, check_vocabulary, checked_target, hidden_input
from compile_and_serve.models.drafters.hidden_states import embedding_names, head_names, hidden_size_of, num_layers_of, with_hidden_states
from compile_and_serve.models.families.qwen3 import Qwen3ForCausalLM
from compile_and_serve.models.layers import RotaryEmbedding, apply_rope
from compile_and_serve.models.spec import ModelSpec, ShardStyle

CONTEXT = "context"  # the output of `DFlashContext`
_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")


class ContextAttention(nn.Module):
    """The keys and values of a layer of the block's decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size = config.num_key_value_heads * config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> None:
        k_TKE = self.k_norm(self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        # Steps of this model have no sequences, so the op only writes: any tensor of the right shape does for the queries.
        attention(v_TKE, apply_rope(k_TKE, cos_TE, sin_TE), v_TKE, kv_cache, 1.0)


class ContextLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = ContextAttention(config)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> None:
        self.self_attn(x_TD, cos_TE, sin_TE, kv_cache)


class DFlashContextModel(nn.Module):
    def __init__(self, config: DecoderConfig, num_features: int) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(config)
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(ContextLayer(config) for _ in range(config.num_hidden_layers))


class DFlashContext(nn.Module):
    """forward(hidden_states [T, F], positions int64 [T], a KV cache per layer) → the context [T, D], from which all layers make their keys
    and values.
    """

    def __init__(self, config: DecoderConfig, num_features: int) -> None:
        super().__init__()
        self.model = DFlashContextModel(config, num_features)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        x_TD = self.model.hidden_norm(self.model.fc(hidden_states))
        cos_TE, sin_TE = self.model.rotary_emb(positions, x_TD.dtype)
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            layer(x_TD, cos_TE, sin_TE, kv_cache)
        return x_TD


def dflash(config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype) -> DrafterSpec:
    """A DFlash block drafter. Raises `ModelConfigError` with one sentence for a wrong config, and for one of a later kind."""
    own = config.get("dflash_config")
    own = own if isinstance(own, Mapping) else {}
    _check_dflash(config, own)
    decoder, size = DecoderConfig.from_dict({**config, "tie_word_embeddings": False}), hidden_size_of(target)
    if decoder.hidden_size != size:
        raise ModelConfigError(
            f"The drafter's hidden size is {decoder.hidden_size} and the model's {size}: use a drafter that was trained for this model."
        )
    check_vocabulary(decoder.vocab_size, target)
    layers, mask_token = own.get("target_layer_ids"), own.get("mask_token_id", config.get("mask_token_id"))
    num_layers = num_layers_of(target)
    if not isinstance(layers, list) or not layers or layers != [one for one in range(num_layers) if one in layers]:
        raise ModelConfigError(
            f"target_layer_ids in the drafter's dflash_config must be layers of the model, which has {num_layers}, in order, got "
            f"{layers!r:.200}."
        )
    if type(mask_token) is not int or not 0 <= mask_token < decoder.vocab_size:
        raise ModelConfigError(f"mask_token_id in the drafter's dflash_config must be a token of its vocabulary, got {mask_token!r:.200}.")
    target = with_hidden_states(checked_target(target), tuple(layer + 1 for layer in layers))
    num_features = size * len(layers)
    spec = decoder_spec(lambda: Qwen3ForCausalLM(decoder), decoder, config, dtype)
    plan: Mapping[str, ShardStyle] = {**DECODER_TP_PLAN, "model.fc": "replicated"}
    context = decoder_spec(lambda: DFlashContext(decoder, num_features), decoder, config, dtype, tp_plan=plan)
    return DrafterSpec(
        spec=_shares_checkpoint(spec, context),
        context=replace(
            _shares_checkpoint(context, spec),
            inputs=(hidden_input(num_features, dtype), POSITIONS),
            outputs=(StepOutput(name=CONTEXT, dims=(TOKENS, size)),),
        ),
        target=target,
        max_tokens=positive_int(config, "block_size") - 1,
        borrowed_weights={EMBEDDING: embedding_names(target), HEAD: head_names(target)},
        mask_token=mask_token,
    )


def _check_dflash(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `ModelConfigError` for what other kinds of block drafters have."""
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in _ARCHITECTURES:
        raise ModelConfigError(f"The drafter is a {architecture}, but the method dflash takes one of {', '.join(_ARCHITECTURES)}.")
    unsupported = {
        "layers without full attention": set(config.get("layer_types") or ()) - {"full_attention"} or own.get("use_swa"),
        "biases in attention": config.get("attention_bias"),  # of which o_proj has one too
        "a causal mask": config.get("is_causal") or own.get("causal"),
        "attention sinks": own.get("attention_sink_bias") or config.get("add_swa_attention_sink_bias"),
        "scaled embeddings": own.get("input_embedding_scale", config.get("input_embedding_scale", 1.0)) != 1.0,
    }
    if found := [what for what, is_there in unsupported.items() if is_there]:
        raise ModelConfigError(
            f"The block drafter has {' and '.join(found)}, which is not supported: choose another one in speculative_config."
        )


def _shares_checkpoint(spec: ModelSpec, other: ModelSpec) -> ModelSpec:
    """The spec, which reads its tensors from the checkpoint that `other` reads too. Names there lack "model."."""
    names, others = ({name.removeprefix("model."): name for name, _ in one.module.named_parameters()} for one in (spec, other))
    return replace(spec, weight_map={**dict.fromkeys(others), **names, **spec.weight_map})

"""EAGLE heads (arXiv:2401.15077) and EAGLE-3 heads (arXiv:2503.01840): one decoder layer that drafts from the target's hidden states.

Shape legend: T tokens, S rows whose logits are needed, D hidden size, V vocabulary of the drafts.

At position i a head reads the hidden state of token i and the embedding of token i + 1, and predicts token i + 2. To go on, it
reads its own output at i in place of the hidden state of token i + 1, which the target has not computed yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.drafters.drafter_spec import (
    EMBEDDING,
    HEAD,
    DrafterSpec,
    check_vocabulary,
    checked_target,
    reads_hidden_states,
)
from compile_and_serve.models.drafters.hidden_states import embedding_names, head_names, hidden_size_of, num_layers_of, with_hidden_states
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer
from compile_and_serve.models.layers import GatedMlp, RotaryEmbedding
from compile_and_serve.models.quantization.stored_weights import with_stored_weights
from compile_and_serve.models.spec import ModelSpec, ShardStyle


class EagleModel(nn.Module):
    """The layers and what comes before them. The first layer has no norm before its attention."""

    def __init__(self, config: DecoderConfig, fc_bias: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()
        self.norm = nn.Identity()  # the target's output head reads the hidden states, as it reads the target's own after the last norm

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, hidden_TD: torch.Tensor, kv_caches: list[torch.Tensor]
    ) -> torch.Tensor:
        x_TD = self.fc(torch.cat((self.embed_tokens(input_ids_T), hidden_TD), dim=-1))
        cos_TE, sin_TE = self.rotary_emb(positions_T, x_TD.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, kv_cache)
        return x_TD


class Eagle3Layer(nn.Module):
    """Attention reads the embedding and the hidden state side by side, each with a norm of its own.

    norm_before_residual: the hidden state's norm is added to the attention's output, not the hidden state.
    """

    def __init__(self, config: DecoderConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, input_size=2 * config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(
        self, embeddings_TD: torch.Tensor, hidden_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        normed_TD = self.hidden_norm(hidden_TD)
        x = torch.cat((self.input_layernorm(embeddings_TD), normed_TD), dim=-1)
        residual_TD = normed_TD if self.norm_before_residual else hidden_TD
        x_TD = residual_TD + self.self_attn(x, cos_TE, sin_TE, kv_cache)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Eagle3Model(nn.Module):
    def __init__(self, config: DecoderConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.midlayer = Eagle3Layer(config, norm_before_residual)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, hidden_TD: torch.Tensor, kv_caches: list[torch.Tensor]
    ) -> torch.Tensor:
        cos_TE, sin_TE = self.rotary_emb(positions_T, hidden_TD.dtype)
        return self.midlayer(self.embed_tokens(input_ids_T), hidden_TD, cos_TE, sin_TE, kv_caches[0])


class EagleForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], hidden_states [T, D], kv_caches, logits_indices int64 [S]) → logits [S, V] and
    hidden states [S, D].
    """

    def __init__(self, model: EagleModel | Eagle3Model, config: DecoderConfig, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_SD = self.model(input_ids, positions, hidden_states, kv_caches)[logits_indices]
        return self.lm_head(self.model.norm(hidden_SD)), hidden_SD


def eagle(config: Mapping[str, Any], target: ModelSpec, tensors: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype) -> DrafterSpec:
    """An EAGLE-1 head. tensors: names and shapes of its checkpoint; empty for random weights. Raises `ModelConfigError`."""
    if any(name.removeprefix("model.").startswith(("midlayer.", "d2t")) for name in tensors):
        raise ModelConfigError("The drafter is an EAGLE-3 head: use the method eagle3 in speculative_config.")
    decoder, size = DecoderConfig.from_dict({**config, "tie_word_embeddings": False}), hidden_size_of(target)
    if decoder.hidden_size != size:
        raise ModelConfigError(
            f"The EAGLE head's hidden size is {decoder.hidden_size} and the model's {size}: use a head that was trained for this model."
        )
    check_vocabulary(decoder.vocab_size, target)
    has_bias = any(name.endswith("fc.bias") for name in tensors)
    plan: Mapping[str, ShardStyle] = {**DECODER_TP_PLAN, "model.fc": "replicated"}
    model = partial(EagleModel, decoder, has_bias)
    spec = decoder_spec(lambda: EagleForCausalLM(model(), decoder, decoder.vocab_size), decoder, config, dtype, tp_plan=plan)
    return DrafterSpec(
        spec=with_stored_weights(reads_hidden_states(spec, decoder.hidden_size, dtype)),
        target=with_hidden_states(checked_target(target), (num_layers_of(target),)),
        hidden_size=decoder.hidden_size,
        borrowed_weights={EMBEDDING: embedding_names(target), HEAD: head_names(target)},
    )


def eagle3(config: Mapping[str, Any], target: ModelSpec, tensors: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype) -> DrafterSpec:
    """An EAGLE-3 head. tensors: names and shapes of its checkpoint; empty for random weights. Raises `ModelConfigError`."""
    if tensors and not any("midlayer." in name or "hidden_norm." in name for name in tensors):
        raise ModelConfigError(
            "The drafter has no tensors of an EAGLE-3 head (midlayer.…, hidden_norm): use the method eagle for an EAGLE-1 head, or another "
            "drafter."
        )
    config = {**config, "num_hidden_layers": 1, "tie_word_embeddings": False}
    decoder, num_layers = DecoderConfig.from_dict(config), num_layers_of(target)
    check_vocabulary(decoder.vocab_size, target)
    draft_vocab_size = positive_int(config, "draft_vocab_size", decoder.vocab_size)
    norm_before_residual = config.get("norm_before_residual", False)
    if not isinstance(norm_before_residual, bool):
        raise ModelConfigError(f"norm_before_residual in the EAGLE head's config must be true or false, got {norm_before_residual!r:.200}.")
    given = positive_int(config, "target_hidden_size", hidden_size_of(target))
    if given != hidden_size_of(target):
        raise ModelConfigError(
            f"The EAGLE head reads hidden states of {given} features and the model has {hidden_size_of(target)}: use a head that was "
            "trained for this model."
        )
    plan = {name.replace("model.layers.*", "model.midlayer"): style for name, style in DECODER_TP_PLAN.items()}
    model = partial(Eagle3Model, decoder, norm_before_residual)
    spec = decoder_spec(lambda: EagleForCausalLM(model(), decoder, draft_vocab_size), decoder, config, dtype, tp_plan=plan)
    # `speculators` writes the layer as the first of a list.
    parameters = [name for name, _ in spec.module.named_parameters() if "midlayer." in name]
    listed = {name.replace("model.midlayer.", f"{prefix}layers.0."): name for name in parameters for prefix in ("", "model.")}
    spec = replace(spec, weight_map={**listed, **spec.weight_map})
    return DrafterSpec(
        spec=with_stored_weights(reads_hidden_states(spec, decoder.hidden_size, dtype)),
        target=with_hidden_states(checked_target(target), _eagle3_taps(config, num_layers)),
        hidden_size=decoder.hidden_size,
        combine=True,
        maps_tokens=draft_vocab_size != decoder.vocab_size or "d2t" in tensors,
        borrowed_weights={EMBEDDING: embedding_names(target), HEAD: head_names(target)},
    )


def _eagle3_taps(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads. vLLM's configs number these; those with an `eagle_config`, which are SGLang's, number
    the layers whose outputs they are.
    """
    name, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config")
    inner = nested.get(name) if isinstance(nested, Mapping) else None
    given = inner or config.get(name) or (2, num_layers // 2, num_layers - 3)
    if not isinstance(given, list | tuple) or not all(type(layer) is int for layer in given):
        raise ModelConfigError(f"{name} in the EAGLE head's config must be a list of layer numbers, got {given!r:.200}.")
    return tuple(layer + 1 if inner else layer for layer in given)

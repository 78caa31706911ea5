"""EAGLE heads (arXiv:2401.15077) and EAGLE-3 heads (arXiv:2503.01840): one decoder layer that drafts from the target's hidden states.

Shape legend: T tokens, S rows whose logits are needed, D hidden size, V vocabulary of the drafts.

At position i a head reads the hidden state of token i and the embedding of token i + 1, and predicts token i + 2. To go on, it
reads its own output at i in place of the hidden state of token i + 1, which the target has not computed yet.
"""

from __future__ import annotations

import torch
from torch import nn

from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.layers import GatedMlp, RotaryEmbedding
from compile_and_serve.models.llama import LlamaAttention, LlamaDecoderLayer


class EagleModel(nn.Module):
    """The layers and what comes before them. The first layer has no norm before its attention."""

    def __init__(self, config: DecoderConfig, fc_bias: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, hidden_TD: torch.Tensor, kv_caches: list[torch.Tensor]
    ) -> torch.Tensor:
        x_TD = self.fc(torch.cat((self.embed_tokens(input_ids_T), hidden_TD), dim=-1))
        cos_TE, sin_TE = self.rotary_emb(positions_T, x_TD.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, kv_cache)
        return x_TD


class EagleForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], hidden_states [T, D], kv_caches, logits_indices int64 [S]) → logits [S, V] and
    hidden states [S, D]. The target's output head reads the hidden states, as it reads the target's own after the last norm.
    """

    def __init__(self, config: DecoderConfig, fc_bias: bool) -> None:
        super().__init__()
        self.model = EagleModel(config, fc_bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_SD = self.model(input_ids, positions, hidden_states, kv_caches)[logits_indices]
        return self.lm_head(hidden_SD), hidden_SD


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


class Eagle3ForCausalLM(nn.Module):
    """As `EagleForCausalLM`. The hidden states have the drafter's size. V: the drafter's own vocabulary.
    norm_before_residual: of `Eagle3Layer`.
    """

    def __init__(self, config: DecoderConfig, draft_vocab_size: int, norm_before_residual: bool) -> None:
        super().__init__()
        self.model = Eagle3Model(config, norm_before_residual)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)

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

"""BART: an encoder of text, and a decoder that reads its rows by cross-attention (arXiv:1910.13461). A norm follows each sublayer.

Shape legend: T tokens of the step (of the text, in the encoder), S rows whose logits are needed, D width, V vocabulary, L layers of the
decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import POSITIONS
from compile_and_serve.custom_ops.step_data import SOURCE_IDS
from compile_and_serve.models.config import UnsupportedConfigError, positive_int
from compile_and_serve.models.decoder_spec import on_meta
from compile_and_serve.models.encoder_decoder import (
    TP_PLAN,
    CrossAttentionLayer,
    EncoderAttention,
    KeysAndValues,
    SelfAttention,
    decoder_start,
    encoder_decoder_spec,
    stored_name,
)
from compile_and_serve.models.encoder_layers import ACTIVATIONS
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.patches import array_input

_FIRST_POSITION = 2  # of a text, in the table of positions


class Mlp(nn.Module):
    """The second half of a layer."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.activation = ACTIVATIONS[activation]

    def after_attention(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.final_layer_norm(x_TD + self.fc2(self.activation(self.fc1(x_TD))))


class EncoderLayer(Mlp):
    def __init__(self, config: Mapping[str, Any]) -> None:
        width = positive_int(config, "d_model")
        super().__init__(width, positive_int(config, "encoder_ffn_dim"), config.get("activation_function", "gelu"))
        self.self_attn = EncoderAttention(width, positive_int(config, "encoder_attention_heads"), key_bias=True)
        self.self_attn_layer_norm = nn.LayerNorm(width)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.after_attention(self.self_attn_layer_norm(x_TD + self.self_attn(x_TD)))


class DecoderLayer(Mlp):
    def __init__(self, config: Mapping[str, Any]) -> None:
        width, heads = positive_int(config, "d_model"), positive_int(config, "decoder_attention_heads")
        super().__init__(width, positive_int(config, "decoder_ffn_dim"), config.get("activation_function", "gelu"))
        self.self_attn, self.encoder_attn = SelfAttention(width, heads, key_bias=True), CrossAttentionLayer(width, heads)
        self.self_attn_layer_norm, self.encoder_attn_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x_TD: torch.Tensor, kv_cache: torch.Tensor, cross_cache: torch.Tensor, rows_T: torch.Tensor) -> torch.Tensor:
        x_TD = self.self_attn_layer_norm(x_TD + self.self_attn(x_TD, kv_cache))
        read_TD, _ = self.encoder_attn(x_TD, cross_cache, rows_T)
        return self.after_attention(self.encoder_attn_layer_norm(x_TD + read_TD))


class Positions(nn.Module):
    """Embedded tokens + positions, normalized."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = positive_int(config, "d_model")
        self.embed_positions = nn.Embedding(positive_int(config, "max_position_embeddings") + _FIRST_POSITION, width)
        self.layernorm_embedding = nn.LayerNorm(width)
        self.embed_scale = width**0.5 if config.get("scale_embedding") else 1.0

    def embedded(self, tokens_TD: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.layernorm_embedding(tokens_TD * self.embed_scale + self.embed_positions(positions + _FIRST_POSITION))


class Decoder(Positions):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(positive_int(config, "decoder_layers")))


class BartForConditionalGeneration(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache and a cross cache per layer, logits_indices int64 [S],
    cross_rows int32 [T]) → logits [S, V]
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, vocab_size = positive_int(config, "d_model"), positive_int(config, "vocab_size")
        self.model = nn.ModuleDict({"shared": nn.Embedding(vocab_size, width), "decoder": Decoder(config)})
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        if config.get("tie_word_embeddings", True):
            self.lm_head.weight = self.model["shared"].weight  # type: ignore[assignment]
        self.final_logits_bias = nn.Parameter(torch.empty(1, vocab_size))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        cross_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        cross_rows: torch.Tensor,
    ) -> torch.Tensor:
        decoder: Any = self.model["decoder"]
        x_TD = decoder.embedded(self.model["shared"](input_ids), positions)
        for layer, kv_cache, cross_cache in zip(decoder.layers, kv_caches, cross_caches, strict=True):
            x_TD = layer(x_TD, kv_cache, cross_cache, cross_rows)
        return self.lm_head(x_TD[logits_indices]) + self.final_logits_bias


class Encoder(Positions):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(positive_int(config, "encoder_layers")))


class BartEncoder(nn.Module):
    """forward(source_ids int64 [T], positions int64 [T]) → keys and values of the decoder's layers [T, L · 2 · D]"""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = positive_int(config, "d_model")
        self.shared, self.encoder = nn.Embedding(positive_int(config, "vocab_size"), width), Encoder(config)
        self.cross = nn.ModuleList(KeysAndValues(width, key_bias=True) for _ in range(positive_int(config, "decoder_layers")))

    def forward(self, source_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x_TD = self.encoder.embedded(self.shared(source_ids), positions)
        for layer in self.encoder.layers:
            x_TD = layer(x_TD)
        return torch.cat([layer(x_TD) for layer in self.cross], dim=1)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    width, heads = positive_int(config, "d_model"), positive_int(config, "decoder_attention_heads")
    if width % heads or config.get("activation_function", "gelu") not in ACTIVATIONS:
        raise UnsupportedConfigError(f"BART with {heads} heads of {width} features, or with this activation, is not supported.")
    max_len = positive_int(config, "max_position_embeddings")
    decoder, encoder = on_meta(lambda: BartForConditionalGeneration(config), dtype), on_meta(lambda: BartEncoder(config), dtype)
    return encoder_decoder_spec(
        decoder,
        encoder,
        config,
        layer=KVCacheSpec(num_kv_heads=heads, head_dim=width // heads),
        num_layers=positive_int(config, "decoder_layers"),
        vocab_size=positive_int(config, "vocab_size"),
        max_len=max_len,
        max_rows=max_len,
        inputs=(array_input(SOURCE_IDS, torch.int64, ()), POSITIONS),
        of_decoder={name: name for name, _ in decoder.named_parameters()},
        of_encoder={stored_name(name): name for name, _ in encoder.named_parameters()},
        unused=[
            *(f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")),
            *(["lm_head.weight"] if config.get("tie_word_embeddings", True) else []),
        ],
        tp_plan=TP_PLAN,
        decoder_start=decoder_start(config),
    )


register_model("BartForConditionalGeneration", build, features=("full attention", "text encoder"))

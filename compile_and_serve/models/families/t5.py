"""T5: an encoder of text and a decoder with biases by distance in place of positions (arXiv:1910.10683). A norm precedes each sublayer.

Shape legend: T tokens of the step (of the text, in the encoder), S rows whose logits are needed, D width, H heads, E head size,
V vocabulary, L layers of the decoder, F distances, R buckets of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.cross_attention import cross_attention
from compile_and_serve.custom_ops.attention.distance_attention import distance_attention
from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import POSITIONS
from compile_and_serve.custom_ops.step_data import SOURCE_IDS
from compile_and_serve.models.config import UnsupportedConfigError, positive_int
from compile_and_serve.models.decoder_spec import on_meta
from compile_and_serve.models.encoder_decoder import decoder_start, encoder_decoder_spec
from compile_and_serve.models.encoder_layers import ACTIVATIONS
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.patches import array_input

_MAX_LEN = 512  # where the config says none


class Attention(nn.Module):
    """Projections of one sublayer. Scores are not scaled."""

    o: nn.Linear

    def __init__(self, config: Mapping[str, Any], names: str = "qkvo") -> None:
        super().__init__()
        width, self.head_dim = positive_int(config, "d_model"), positive_int(config, "d_kv")
        inner = positive_int(config, "num_heads") * self.head_dim
        for name in names:
            setattr(self, name, nn.Linear(inner, width, bias=False) if name == "o" else nn.Linear(width, inner, bias=False))

    def heads(self, x_TD: torch.Tensor, names: str) -> list[torch.Tensor]:
        """[T, H, E] of each projection."""
        return [getattr(self, name)(x_TD).view(x_TD.shape[0], -1, self.head_dim) for name in names]


class Mlp(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = positive_int(config, "d_model"), positive_int(config, "d_ff")
        self.activation, is_gated = _activation(config)
        if is_gated:
            self.wi_0, self.wi_1 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        else:
            self.wi = nn.Linear(width, inner, bias=False)
        self.is_gated = is_gated
        self.wo = nn.Linear(inner, width, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        activation = ACTIVATIONS[self.activation]
        return self.wo(activation(self.wi_0(x_TD)) * self.wi_1(x_TD) if self.is_gated else activation(self.wi(x_TD)))


def _norm(config: Mapping[str, Any]) -> nn.RMSNorm:
    return nn.RMSNorm(positive_int(config, "d_model"), eps=float(config.get("layer_norm_epsilon", 1e-6)))


class EncoderLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(config), _norm(config)
        self.mlp, self.mlp_norm = Mlp(config), _norm(config)

    def forward(self, x_TD: torch.Tensor, columns_F: torch.Tensor, bias_HR: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention.heads(self.attention_norm(x_TD), "qkv")
        mixed_THE = encoder_attention(q, k, v, 1.0, columns_F=columns_F, distance_bias_HR=bias_HR)
        x_TD = x_TD + self.attention.o(mixed_THE.flatten(1))
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class DecoderLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(config), _norm(config)
        self.cross, self.cross_norm = Attention(config, "qo"), _norm(config)
        self.mlp, self.mlp_norm = Mlp(config), _norm(config)

    def forward(
        self,
        x_TD: torch.Tensor,
        kv_cache: torch.Tensor,
        cross_cache: torch.Tensor,
        rows_T: torch.Tensor,
        columns_F: torch.Tensor,
        bias_HR: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = self.attention.heads(self.attention_norm(x_TD), "qkv")
        x_TD = x_TD + self.attention.o(distance_attention(q, k, v, kv_cache, 1.0, columns_F, bias_HR).flatten(1))
        (q,) = self.cross.heads(self.cross_norm(x_TD), "q")
        x_TD = x_TD + self.cross.o(cross_attention(q, cross_cache, rows_T, 1.0).flatten(1))
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class T5ForConditionalGeneration(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache and a cross cache per layer, logits_indices int64 [S],
    cross_rows int32 [T]) → logits [S, V]
    """

    columns: torch.Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, vocab_size = positive_int(config, "d_model"), positive_int(config, "vocab_size")
        self.shared = nn.Embedding(vocab_size, width)
        self.distance_bias = nn.Embedding(positive_int(config, "relative_attention_num_buckets"), positive_int(config, "num_heads"))
        self.register_buffer("columns", torch.empty(2 * _farthest(config) + 1, dtype=torch.int64), persistent=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(_num_decoder_layers(config)))
        self.final_norm = _norm(config)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        if is_tied := config.get("tie_word_embeddings", True):
            self.lm_head.weight = self.shared.weight
        self.scale = width**-0.5 if config.get("scale_decoder_outputs", is_tied) else 1.0

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        cross_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        cross_rows: torch.Tensor,
    ) -> torch.Tensor:
        x_TD, bias_HR = self.shared(input_ids), self.distance_bias.weight.t()
        for layer, kv_cache, cross_cache in zip(self.layers, kv_caches, cross_caches, strict=True):
            x_TD = layer(x_TD, kv_cache, cross_cache, cross_rows, self.columns, bias_HR)
        return self.lm_head(self.final_norm(x_TD[logits_indices]) * self.scale)


class T5Encoder(nn.Module):
    """forward(source_ids int64 [T], positions int64 [T]) → keys and values of the decoder's layers [T, L · 2 · H · E]"""

    columns: torch.Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.shared = nn.Embedding(positive_int(config, "vocab_size"), positive_int(config, "d_model"))
        self.distance_bias = nn.Embedding(positive_int(config, "relative_attention_num_buckets"), positive_int(config, "num_heads"))
        self.register_buffer("columns", torch.empty(2 * _farthest(config) + 1, dtype=torch.int64), persistent=False)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(positive_int(config, "num_layers")))
        self.final_norm = _norm(config)
        self.cross = nn.ModuleList(Attention(config, "kv") for _ in range(_num_decoder_layers(config)))

    def forward(self, source_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x_TD, bias_HR = self.shared(source_ids), self.distance_bias.weight.t()
        for layer in self.layers:
            x_TD = layer(x_TD, self.columns, bias_HR)
        x_TD = self.final_norm(x_TD)
        return torch.cat([linear(x_TD) for layer in self.cross for linear in (layer.k, layer.v)], dim=1)  # type: ignore[operator]


def buckets(num_buckets: int, farthest: int, *, both_ways: bool) -> torch.Tensor:
    """The bucket of each distance j - i from -farthest to farthest: int64 [F].

    Half of those of a direction are of one distance each, the others grow logarithmically. Without `both_ways` keys are not behind queries.
    """
    distance_F = torch.arange(-farthest, farthest + 1)
    offset_F = torch.zeros_like(distance_F)
    if both_ways:
        num_buckets //= 2
        offset_F, distance_F = (distance_F > 0) * num_buckets, distance_F.abs()
    else:
        distance_F = (-distance_F).clamp(min=0)
    exact = num_buckets // 2
    grown_F = torch.log(distance_F.clamp(min=1).float() / exact) / math.log(farthest / exact) * (num_buckets - exact)
    return offset_F + torch.where(distance_F < exact, distance_F, (exact + grown_F.long()).clamp(max=num_buckets - 1))


def _farthest(config: Mapping[str, Any]) -> int:
    return int(config.get("relative_attention_max_distance", 128))


def _num_decoder_layers(config: Mapping[str, Any]) -> int:
    return positive_int(config, "num_decoder_layers" if config.get("num_decoder_layers") else "num_layers")


def _activation(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Its name, and whether it is gated."""
    kind = str(config.get("feed_forward_proj", "relu"))
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise UnsupportedConfigError(f"T5 with feed_forward_proj {kind!r} is not supported.")
    return name, kind.startswith("gated-")


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    config = {"relative_attention_num_buckets": 32, **config}
    max_len = int(config.get("n_positions") or _MAX_LEN)
    num_buckets, farthest = positive_int(config, "relative_attention_num_buckets"), _farthest(config)
    decoder, encoder = on_meta(lambda: T5ForConditionalGeneration(config), dtype), on_meta(lambda: T5Encoder(config), dtype)
    return encoder_decoder_spec(
        decoder,
        encoder,
        config,
        layer=KVCacheSpec(num_kv_heads=positive_int(config, "num_heads"), head_dim=positive_int(config, "d_kv")),
        num_layers=_num_decoder_layers(config),
        vocab_size=positive_int(config, "vocab_size"),
        max_len=max_len,
        max_rows=max_len,
        inputs=(array_input(SOURCE_IDS, torch.int64, ()), POSITIONS),
        of_decoder={_stored_name(name, "decoder"): name for name, _ in decoder.named_parameters()},
        of_encoder={_stored_name(name, "encoder"): name for name, _ in encoder.named_parameters()},
        unused=[
            *(f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")),
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            *(["lm_head.weight"] if config.get("tie_word_embeddings", True) else []),
        ],
        buffers={"columns": buckets(num_buckets, farthest, both_ways=False)},
        encoder_buffers={"columns": buckets(num_buckets, farthest, both_ways=True)},
        decoder_start=decoder_start(config),
    )


_PARTS = {"attention": "layer.0.SelfAttention", "attention_norm": "layer.0.layer_norm", "cross_norm": "layer.1.layer_norm"}


def _stored_name(name: str, side: str) -> str:
    """A parameter of either side in the checkpoint."""
    if name in ("shared.weight", "lm_head.weight"):
        return name
    if name == "distance_bias.weight":
        return f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    if name == "final_norm.weight":
        return f"{side}.final_layer_norm.weight"
    found = re.fullmatch(r"(layers\.|cross\.)(\d+)\.(.*)", name)
    assert found is not None, name
    kind, number, rest = found.groups()
    if kind == "cross.":
        return f"decoder.block.{number}.layer.1.EncDecAttention.{rest}"
    part, _, rest = rest.partition(".")
    last = 2 if side == "decoder" else 1
    parts = {**_PARTS, "cross": "layer.1.EncDecAttention", "mlp": f"layer.{last}.DenseReluDense", "mlp_norm": f"layer.{last}.layer_norm"}
    return f"{side}.block.{number}.{parts[part]}.{rest}"


for _name in ("T5ForConditionalGeneration", "MT5ForConditionalGeneration"):
    register_model(_name, build, features=("full attention", "text encoder"))

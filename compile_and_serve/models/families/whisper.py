"""Whisper: an encoder of 30 seconds of speech, and a decoder that reads its rows by cross-attention (arXiv:2212.04356).

Shape legend: T tokens of the step (rows of 20 ms, in the encoder), S rows whose logits are needed, D width, H heads, E head size,
V vocabulary, M mel bands, L layers of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import ALIGNMENT_QUERIES, LOGITS, POSITIONS, ROWS, TOKENS, StepInput, StepOutput, TokenBatch
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor
from compile_and_serve.models.config import UnsupportedConfigError, positive_int
from compile_and_serve.models.decoder_spec import on_meta
from compile_and_serve.models.encoder_decoder import (
    TP_PLAN,
    CrossAttentionLayer,
    EncoderAttention,
    KeysAndValues,
    SelfAttention,
    encoder_decoder_spec,
    stored_name,
)
from compile_and_serve.models.encoder_layers import ACTIVATIONS
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.patches import array_input, flatten_inputs

ALIGNMENT_HEADS = "alignment_heads"  # in the config: [layer, head] of cross-attention, which tell when a token is said
MEL = "mel"  # the encoder's array: two frames of 10 ms for each row


def _rows_beside(batch: TokenBatch) -> np.ndarray:
    """The rows before and behind each row in its item; at the item's ends the row itself."""
    rows_T = np.arange(len(batch.token_ids))
    before_T, after_T = rows_T - 1, rows_T + 1
    before_T[batch.query_start_loc[:-1]] += 1
    after_T[batch.query_start_loc[1:] - 1] -= 1
    return np.stack((before_T, after_T))


BESIDE = StepInput(name="beside", dtype=torch.int64, dims=(2, TOKENS), fill=_rows_beside)


class DecoderLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads, inner = (positive_int(config, name) for name in ("d_model", "decoder_attention_heads", "decoder_ffn_dim"))
        self.self_attn_layer_norm, self.encoder_attn_layer_norm, self.final_layer_norm = (nn.LayerNorm(width) for _ in range(3))
        self.self_attn, self.encoder_attn = SelfAttention(width, heads), CrossAttentionLayer(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = ACTIVATIONS[config.get("activation_function", "gelu")]

    def forward(
        self, x_TD: torch.Tensor, kv_cache: torch.Tensor, cross_cache: torch.Tensor, rows_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD = x_TD + self.self_attn(self.self_attn_layer_norm(x_TD), kv_cache)
        heard_TD, q_THE = self.encoder_attn(self.encoder_attn_layer_norm(x_TD), cross_cache, rows_T)
        x_TD = x_TD + heard_TD
        return x_TD + self.fc2(self.activation(self.fc1(self.final_layer_norm(x_TD)))), q_THE


class Decoder(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = positive_int(config, "d_model")
        self.embed_tokens = nn.Embedding(positive_int(config, "vocab_size"), width)
        self.embed_positions = nn.Embedding(positive_int(config, "max_target_positions"), width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(positive_int(config, "decoder_layers")))
        self.layer_norm = nn.LayerNorm(width)
        self.embed_scale = width**0.5 if config.get("scale_embedding") else 1.0
        self.alignment_heads: list[list[int]] = config.get(ALIGNMENT_HEADS) or []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        cross_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        rows_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """→ the hidden states of the rows, and the queries [S, A, E] of the A alignment heads; None: there are none"""
        x_TD = self.embed_tokens(input_ids) * self.embed_scale + self.embed_positions(positions)
        queries = []
        for layer, kv_cache, cross_cache in zip(self.layers, kv_caches, cross_caches, strict=True):
            x_TD, q_THE = layer(x_TD, kv_cache, cross_cache, rows_T)
            queries.append(q_THE)
        aligned = [queries[layer][logits_indices, head] for layer, head in self.alignment_heads]
        return self.layer_norm(x_TD[logits_indices]), torch.stack(aligned, dim=1) if aligned else None


class WhisperForConditionalGeneration(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache and a cross cache per layer, logits_indices int64 [S],
    cross_rows int32 [T]) → logits [S, V], and the alignment heads' queries [S, A · E] where the config has such heads
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"decoder": Decoder(config)})
        self.proj_out = nn.Linear(positive_int(config, "d_model"), positive_int(config, "vocab_size"), bias=False)
        if config.get("tie_word_embeddings", True):
            self.proj_out.weight = self.model["decoder"].embed_tokens.weight  # type: ignore[union-attr, assignment]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        cross_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        cross_rows: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x_SD, q_SAE = self.model["decoder"](input_ids, positions, kv_caches, cross_caches, logits_indices, cross_rows)
        logits_SV = self.proj_out(x_SD)
        return logits_SV if q_SAE is None else (logits_SV, q_SAE.flatten(1))


class EncoderLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads, inner = (positive_int(config, name) for name in ("d_model", "encoder_attention_heads", "encoder_ffn_dim"))
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = EncoderAttention(width, heads)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = ACTIVATIONS[config.get("activation_function", "gelu")]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.self_attn_layer_norm(x_TD))
        return x_TD + self.fc2(self.activation(self.fc1(self.final_layer_norm(x_TD))))


class SpeechEncoder(nn.Module):
    """Two convolutions over frames of 10 ms (the second one halves them) and the layers.

    The items of a step lie one behind the other, so the convolutions are products with shifted rows, zero beyond an item's ends.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, bands = positive_int(config, "d_model"), positive_int(config, "num_mel_bins")
        self.conv1, self.conv2 = nn.Linear(3 * bands, width), nn.Linear(3 * width, width)
        self.embed_positions = nn.Embedding(positive_int(config, "max_source_positions"), width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(positive_int(config, "encoder_layers")))
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, mel_T2M: torch.Tensor, positions: torch.Tensor, beside_2T: torch.Tensor) -> torch.Tensor:
        before_T, after_T = beside_2T.unbind(0)
        first_TM, second_TM = mel_T2M.to(self.conv1.weight.dtype).unbind(1)
        is_first_T1, is_last_T1 = (positions == 0)[:, None], (positions[after_T] <= positions)[:, None]
        before_TM, after_TM = second_TM[before_T].masked_fill(is_first_T1, 0.0), first_TM[after_T].masked_fill(is_last_T1, 0.0)
        even_TD = functional.gelu(self.conv1(_windows(before_TM, first_TM, second_TM)))
        odd_TD = functional.gelu(self.conv1(_windows(first_TM, second_TM, after_TM)))
        behind_TD = odd_TD[before_T].masked_fill(is_first_T1, 0.0)
        x_TD = functional.gelu(self.conv2(_windows(behind_TD, even_TD, odd_TD))) + self.embed_positions(positions)
        for layer in self.layers:
            x_TD = layer(x_TD)
        return self.layer_norm(x_TD)


def _windows(*parts_TD: torch.Tensor) -> torch.Tensor:
    """[T, 3 · D] as a flat kernel [out, D, 3] takes it."""
    return torch.stack(parts_TD, dim=-1).flatten(1)


class WhisperEncoder(nn.Module):
    """forward(mel float32 [T, 2, M], positions int64 [T], beside int64 [2, T]) → keys and values of the decoder's layers [T, L · 2 · D]"""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.encoder = SpeechEncoder(config)
        self.cross = nn.ModuleList(KeysAndValues(positive_int(config, "d_model")) for _ in range(positive_int(config, "decoder_layers")))

    def forward(self, mel: torch.Tensor, positions: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        x_TD = self.encoder(mel, positions, beside)
        return torch.cat([layer(x_TD) for layer in self.cross], dim=1)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    width, heads = positive_int(config, "d_model"), positive_int(config, "decoder_attention_heads")
    if width % heads or config.get("activation_function", "gelu") not in ACTIVATIONS:
        raise UnsupportedConfigError(f"Whisper with {heads} heads of {width} features, or with this activation, is not supported.")
    decoder, encoder = on_meta(lambda: WhisperForConditionalGeneration(config), dtype), on_meta(lambda: WhisperEncoder(config), dtype)
    bands = positive_int(config, "num_mel_bins")
    kernels = {
        name: ArrangedWeight(
            value=(flatten_inputs, f"model.{name}"), tensors=(StoredTensor(name=f"model.{name}", shape=(width, inputs, 3), dtype=dtype),)
        )
        for name, inputs in (("encoder.conv1.weight", bands), ("encoder.conv2.weight", width))
    }
    aligned = len(config.get(ALIGNMENT_HEADS) or []) * width // heads
    return encoder_decoder_spec(
        decoder,
        encoder,
        config,
        layer=KVCacheSpec(num_kv_heads=heads, head_dim=width // heads),
        num_layers=positive_int(config, "decoder_layers"),
        vocab_size=positive_int(config, "vocab_size"),
        max_len=positive_int(config, "max_target_positions"),
        max_rows=positive_int(config, "max_source_positions"),
        inputs=(array_input(MEL, torch.float32, (2, bands)), POSITIONS, BESIDE),
        of_decoder={name: name for name, _ in decoder.named_parameters()},
        of_encoder={stored_name(name): name for name, _ in encoder.named_parameters() if name not in kernels},
        unused=["proj_out.weight"] if config.get("tie_word_embeddings", True) else [],
        arranged=kernels,
        outputs=(StepOutput(name=LOGITS), *([StepOutput(name=ALIGNMENT_QUERIES, dims=(ROWS, aligned))] if aligned else [])),
        tp_plan={"model.decoder.embed_tokens": "vocab", "proj_out": "vocab", **TP_PLAN},
    )


register_model("WhisperForConditionalGeneration", build, features=("full attention", "speech"))

"""What decoders that read an encoder's rows by cross-attention have in common: Whisper, BART, T5.

The encoder's side also has the projections of the decoder's cross-attention keys and values, so that a row is computed once.

Shape legend: T tokens of the step (rows, in the encoder), D width, H heads, E head size, L layers of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.attention.cross_attention import CROSS_ROWS, cross_attention
from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.state.cross import CROSS_CACHES, CrossAttention
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import DECODER_INPUTS, TOKENS, StepInput, StepOutput
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight
from compile_and_serve.models.config import UnsupportedConfigError
from compile_and_serve.models.spec import ModelSpec, ShardStyle, full_attention

TP_PLAN: Mapping[str, ShardStyle] = {
    **{f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.decoder.layers.*.encoder_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.encoder_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
}


class _Attention(nn.Module):
    """The projections of BART's and Whisper's attention. Whisper's keys have no bias."""

    def __init__(self, width: int, num_heads: int, *, key_bias: bool = False) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(3))
        self.k_proj = nn.Linear(width, width, bias=key_bias)

    def heads(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, H, E]."""
        q, k, v = (linear(x_TD).view(x_TD.shape[0], -1, self.head_dim) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v


class SelfAttention(_Attention):
    """Attention of tokens to those before them."""

    def forward(self, x_TD: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        return self.out_proj(attention(*self.heads(x_TD), kv_cache, self.head_dim**-0.5).flatten(1))


class EncoderAttention(_Attention):
    """Attention of rows to those of their item."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.out_proj(encoder_attention(*self.heads(x_TD), self.head_dim**-0.5).flatten(1))


class CrossAttentionLayer(nn.Module):
    """Attention of tokens to the encoder's rows, whose keys and values the encoder's side computes."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_TD: torch.Tensor, cross_cache: torch.Tensor, rows_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """→ the result, and the queries [T, H, E]"""
        q_THE = self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        return self.out_proj(cross_attention(q_THE, cross_cache, rows_T, self.head_dim**-0.5).flatten(1)), q_THE


class KeysAndValues(nn.Module):
    """Of one layer's cross-attention. [T, D] → [T, 2 · D]"""

    def __init__(self, width: int, *, key_bias: bool = False) -> None:
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(width, width, bias=key_bias), nn.Linear(width, width)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.k_proj(x_TD), self.v_proj(x_TD)), dim=1)


def stored_name(name: str) -> str:
    """A parameter of BART's or Whisper's encoder's side in the checkpoint."""
    if name.startswith("cross."):
        _, number, rest = name.split(".", 2)
        return f"model.decoder.layers.{number}.encoder_attn.{rest}"
    return f"model.{name}"


def decoder_start(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens with which the decoder begins: the start, and the first one where the config forces it.

    Raises `UnsupportedConfigError`.
    """
    start = config.get("decoder_start_token_id")
    if not isinstance(start, int):
        raise UnsupportedConfigError("The config has no decoder_start_token_id, with which the decoder must begin.")
    forced = config.get("forced_bos_token_id")
    return (start,) if forced is None else (start, int(forced))


def encoder_decoder_spec(
    decoder: nn.Module,
    encoder: nn.Module,
    config: Mapping[str, Any],
    *,
    layer: KVCacheSpec,
    num_layers: int,
    vocab_size: int,
    max_len: int,
    max_rows: int,
    inputs: tuple[StepInput, ...],
    of_decoder: Mapping[str, str],
    of_encoder: Mapping[str, str],
    unused: Iterable[str],
    arranged: Mapping[str, ArrangedWeight] | None = None,
    encoder_buffers: Mapping[str, torch.Tensor] | None = None,
    **of_model: Any,
) -> ModelSpec:
    """A decoder whose layers all have self-attention and cross-attention with the shape of `layer`, and its encoder.

    max_len: tokens of the decoder. max_rows: of the encoder. inputs: of the encoder. of_decoder, of_encoder: tensors of checkpoints →
    parameters. unused: tensors that neither has. arranged: parameters of the encoder whose tensors are stored otherwise. of_model: further
    fields of `ModelSpec`.
    """
    arranged = arranged or {}
    rows = StepOutput(name="rows", dims=(TOKENS, 2 * num_layers * layer.num_kv_heads * layer.head_dim))
    of_others = [name for name in of_encoder if name not in of_decoder]
    of_others += [tensor.name for one in arranged.values() for tensor in one.tensors]
    return ModelSpec(
        module=decoder,
        config=config,
        state=(
            full_attention([layer] * num_layers),
            StateGroup(name=CROSS_CACHES, layers=(layer,) * num_layers, kind=CrossAttention(max_rows=max_rows)),
        ),
        vocab_size=vocab_size,
        max_model_len=max_len,
        inputs=(*DECODER_INPUTS, CROSS_ROWS),
        weight_map={**of_decoder, **dict.fromkeys([*unused, *of_others])},
        encoder=ModelSpec(
            module=encoder,
            config=config,
            state=(),
            vocab_size=1,
            max_model_len=max_rows,
            inputs=inputs,
            outputs=(rows,),
            weight_map={**of_encoder, **dict.fromkeys([*unused, *(name for name in of_decoder if name not in of_encoder)])},
            quantized_weights=arranged,
            buffers=encoder_buffers or {},
        ),
        **of_model,
    )

"""Qwen2.5-VL: Qwen2 with images and videos. Most layers of its encoder attend within windows.

Shape legend: T tokens of the step (blocks of M patches, in the encoder), D width of the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import ArrayInfo
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from compile_and_serve.models.families.qwen2 import Qwen2Attention
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.decoder import VisionLanguageForCausalLM, with_encoder
from compile_and_serve.models.vision.names import BLOCK_ORDER, WINDOW_END
from compile_and_serve.models.vision.patch_config import PatchConfig, vision_config, window_blocks
from compile_and_serve.models.vision.patches import (
    PatchAttention,
    PatchEmbedding,
    PatchRope,
    normalization,
    patch_frequencies,
    patch_inputs,
    stored_embedding,
)
from compile_and_serve.models.vision.rope import text_config


class VisionMlp(nn.Module):
    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate_size)
        self.up_proj = nn.Linear(width, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, width)

    def forward(self, x_TMD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_TMD)) * self.up_proj(x_TMD))


class VisionBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.attn = PatchAttention(width, num_heads)
        self.mlp = VisionMlp(width, intermediate_size)

    def forward(
        self, x_TMD: torch.Tensor, cos_TME: torch.Tensor, sin_TME: torch.Tensor, ends_T: torch.Tensor | None, max_window: int
    ) -> torch.Tensor:
        x_TMD = x_TMD + self.attn(self.norm1(x_TMD), cos_TME, sin_TME, ends_T, max_window)
        return x_TMD + self.mlp(self.norm2(x_TMD))


class PatchMerger(nn.Module):
    """The patches of a block become one row of the decoder."""

    def __init__(self, width: int, merged: int, out_size: int) -> None:
        super().__init__()
        self.ln_q = nn.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width * merged, width * merged), nn.GELU(), nn.Linear(width * merged, out_size))

    def forward(self, x_TMD: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.ln_q(x_TMD).flatten(1))


class Qwen25VisionEncoder(nn.Module):
    """forward(patches uint8 [T, M, F], grid int32 [T, 4], window_ends int32 [T], block_order int64 [T]) → rows [T, out_size]

    The blocks of an item come window by window. window_ends: of all windows of the step, in tokens. block_order: which token has the block
    that stands at each place of the image, row by row.
    """

    def __init__(self, config: Mapping[str, Any], patches: PatchConfig) -> None:
        super().__init__()
        width, heads = positive_int(config, "hidden_size"), positive_int(config, "num_heads")
        self.full_layers = frozenset(config.get("fullatt_block_indexes") or (7, 15, 23, 31))
        self.max_window = window_blocks(config, patches) ** 2
        self.patch_embed = PatchEmbedding(patches, width, bias=False)
        self.rotary_pos_emb = PatchRope(width // heads, patches.merge)
        self.blocks = nn.ModuleList(VisionBlock(width, heads, inner_size(config)) for _ in range(positive_int(config, "depth")))
        self.merger = PatchMerger(width, patches.merge**2, positive_int(config, "out_hidden_size"))

    def forward(self, patches: torch.Tensor, grid: torch.Tensor, window_ends: torch.Tensor, block_order: torch.Tensor) -> torch.Tensor:
        x_TMD = self.patch_embed(patches)
        cos_TME, sin_TME = self.rotary_pos_emb(grid)
        for number, block in enumerate(self.blocks):
            in_windows = number not in self.full_layers
            x_TMD = block(x_TMD, cos_TME, sin_TME, window_ends if in_windows else None, self.max_window if in_windows else 0)
        return self.merger(x_TMD)[block_order]


def _fill_window_ends(max_window: int, batch: TokenBatch) -> np.ndarray:
    lengths_T = np.diff(batch.query_start_loc)[batch.sequence_of_token]
    ends_T = np.minimum((batch.positions // max_window + 1) * max_window, lengths_T)  # of synthetic items
    for tokens, rows in batch.rows_of(WINDOW_END):
        ends_T[tokens] = rows
    distinct = np.unique(ends_T + np.repeat(batch.query_start_loc[:-1], np.diff(batch.query_start_loc)))
    return np.concatenate((distinct, np.full(len(ends_T) - len(distinct), distinct[-1]))).astype(np.int32)


def _fill_block_order(batch: TokenBatch) -> np.ndarray:
    order_T = np.arange(len(batch.token_ids))
    for tokens, rows in batch.rows_of(BLOCK_ORDER):
        order_T[tokens] = tokens.start + rows
    return order_T


def _encoder_inputs(vision: Mapping[str, Any], patches: PatchConfig) -> tuple[StepInput, ...]:
    fill_ends = partial(_fill_window_ends, window_blocks(vision, patches) ** 2)
    return (
        *patch_inputs(patches),
        StepInput(
            name="window_ends", dtype=torch.int32, dims=(TOKENS,), fill=fill_ends, ends_segments=True, arrays=(ArrayInfo(name=WINDOW_END),)
        ),
        StepInput(name=BLOCK_ORDER, dtype=torch.int64, dims=(TOKENS,), fill=_fill_block_order, arrays=(ArrayInfo(name=BLOCK_ORDER),)),
    )


def inner_size(vision: Mapping[str, Any]) -> int:
    """Features inside of an MLP: those of the config, and up to 7 that are zero, so that rows begin at multiples of 16 bytes."""
    return -(-positive_int(vision, "intermediate_size") // 8) * 8


@weight_function("fill_up_with_zeros")
def _fill_up_with_zeros(weight: torch.Tensor, *shape: int) -> torch.Tensor:
    filled = weight.new_zeros(shape)
    filled[tuple(slice(size) for size in weight.shape)] = weight
    return filled


def _stored_mlps(vision: Mapping[str, Any], dtype: torch.dtype) -> dict[str, StoredWeight]:
    """How checkpoints hold the MLPs' parameters: without features that `inner_size` adds."""
    width, inner, stored_inner = positive_int(vision, "hidden_size"), inner_size(vision), positive_int(vision, "intermediate_size")
    if inner == stored_inner:
        return {}
    shapes = {f"{name}_proj.{kind}": ("inner", "width")[:dims] for name in ("gate", "up") for kind, dims in (("weight", 2), ("bias", 1))}
    shapes["down_proj.weight"] = ("width", "inner")
    stored: dict[str, StoredWeight] = {}
    for layer in range(positive_int(vision, "depth")):
        for name, dims in shapes.items():
            full, shape = ([size if dim == "inner" else width for dim in dims] for size in (inner, stored_inner))
            tensor = StoredTensor(name=f"blocks.{layer}.mlp.{name}", shape=tuple(shape), dtype=dtype)
            stored[tensor.name] = ArrangedWeight(value=("fill_up_with_zeros", tensor.name, *full), tensors=(tensor,))
    return stored


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    text, vision = text_config(config, rope_theta=1000000.0), vision_config(config)
    if text.get("use_sliding_window"):
        raise ModelConfigError("use_sliding_window of Qwen2.5-VL is not supported: set it to false in the model's config.")
    if vision.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"hidden_act of vision_config must be 'silu', got {vision['hidden_act']!r:.100}.")
    decoder = DecoderConfig.from_dict(text)

    def make() -> nn.Module:
        return VisionLanguageForCausalLM(
            decoder, (LlamaDecoderLayer(decoder, Qwen2Attention(decoder)) for _ in range(decoder.num_hidden_layers))
        )

    patches = PatchConfig.read(config)
    buffers = {f"patch_embed.{name}": value for name, value in normalization(patches).items()}
    width = positive_int(vision, "hidden_size")
    return with_encoder(
        decoder_spec(make, decoder, config, dtype),
        decoder,
        config,
        dtype,
        lambda: Qwen25VisionEncoder(vision, patches),
        inputs=_encoder_inputs(vision, patches),
        buffers={**buffers, "rotary_pos_emb.inv_freq": patch_frequencies(width // positive_int(vision, "num_heads"))},
        stored={**stored_embedding("patch_embed.proj.weight", patches, width, dtype), **_stored_mlps(vision, dtype)},
        max_item_tokens=patches.max_tokens,
    )


register_model("Qwen2_5_VLForConditionalGeneration", build, features=("full attention", "images"))

"""Qwen3-VL and Qwen3-VL-MoE: Qwen3 with images and videos, whose encoder also gives features for the decoder's first layers.

Shape legend: T tokens of the step (blocks of M patches, in the encoder), D width of the encoder, G positions of a side
of its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from compile_and_serve.models.families.moe import MOE_TP_PLAN, MoeConfig, MoeMlp
from compile_and_serve.models.families.qwen3 import Qwen3Attention
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.decoder import VisionLanguageForCausalLM, with_encoder
from compile_and_serve.models.vision.patch_config import PatchConfig, vision_config
from compile_and_serve.models.vision.patches import (
    PatchAttention,
    PatchEmbedding,
    PatchRope,
    normalization,
    patch_frequencies,
    patch_inputs,
    places_of_patches,
    stored_embedding,
)
from compile_and_serve.models.vision.rope import text_config


class VisionMlp(nn.Module):
    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, intermediate_size)
        self.linear_fc2 = nn.Linear(intermediate_size, width)

    def forward(self, x_TMD: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(functional.gelu(self.linear_fc1(x_TMD), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.attn = PatchAttention(width, num_heads)
        self.mlp = VisionMlp(width, intermediate_size)

    def forward(self, x_TMD: torch.Tensor, cos_TME: torch.Tensor, sin_TME: torch.Tensor) -> torch.Tensor:
        x_TMD = x_TMD + self.attn(self.norm1(x_TMD), cos_TME, sin_TME)
        return x_TMD + self.mlp(self.norm2(x_TMD))


class PatchMerger(nn.Module):
    """The patches of a block become one row of the decoder. norms_block: the norm is over the block's patches together, not over each."""

    def __init__(self, width: int, merged: int, out_size: int, *, norms_block: bool) -> None:
        super().__init__()
        self.norms_block = norms_block
        self.norm = nn.LayerNorm(width * merged if norms_block else width, eps=1e-6)
        self.linear_fc1 = nn.Linear(width * merged, width * merged)
        self.linear_fc2 = nn.Linear(width * merged, out_size)

    def forward(self, x_TMD: torch.Tensor) -> torch.Tensor:
        x = self.norm(x_TMD.flatten(1)) if self.norms_block else self.norm(x_TMD).flatten(1)
        return self.linear_fc2(functional.gelu(self.linear_fc1(x)))


class Qwen3VisionEncoder(nn.Module):
    """forward(patches uint8 [T, M, F], grid int32 [T, 4]) → rows [T, out_size · (1 + features)]"""

    def __init__(self, config: Mapping[str, Any], patches: PatchConfig) -> None:
        super().__init__()
        width, heads = positive_int(config, "hidden_size"), positive_int(config, "num_heads")
        out_size, self.merge = positive_int(config, "out_hidden_size"), patches.merge
        self.side = int(positive_int(config, "num_position_embeddings") ** 0.5)
        self.patch_embed = PatchEmbedding(patches, width, bias=True)
        self.pos_embed = nn.Embedding(self.side**2, width)
        self.rotary_pos_emb = PatchRope(width // heads, patches.merge)
        self.blocks = nn.ModuleList(
            VisionBlock(width, heads, positive_int(config, "intermediate_size")) for _ in range(positive_int(config, "depth"))
        )
        merged = patches.merge**2
        self.merger = PatchMerger(width, merged, out_size, norms_block=False)
        self.feature_layers = feature_layers(config)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(width, merged, out_size, norms_block=True) for _ in self.feature_layers)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        x_TMD = self.patch_embed(patches)
        x_TMD = x_TMD + self._positions(grid).to(x_TMD.dtype)
        cos_TME, sin_TME = self.rotary_pos_emb(grid)
        features: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            x_TMD = block(x_TMD, cos_TME, sin_TME)
            if number in self.feature_layers:
                features.append(self.deepstack_merger_list[len(features)](x_TMD))
        return torch.cat((self.merger(x_TMD), *features), dim=-1)

    def _positions(self, grid_T4: torch.Tensor) -> torch.Tensor:
        """[T, M, D]: the table of G × G positions, interpolated to each image's height and width so that its corners stay corners."""
        sides = []
        for place_TM, size_T1 in zip(places_of_patches(grid_T4, self.merge), (grid_T4[:, 2:3], grid_T4[:, 3:4]), strict=True):
            at_TM = place_TM.to(torch.float32) * (self.side - 1) / (size_T1 - 1).clamp(min=1)
            low_TM = at_TM.floor()
            after_TM = at_TM - low_TM
            low_TM = low_TM.to(torch.int64).clamp(0, self.side - 1)
            sides.append(((low_TM, 1 - after_TM), ((low_TM + 1).clamp(max=self.side - 1), after_TM)))
        corners = [(y * self.side + x, of_y * of_x) for y, of_y in sides[0] for x, of_x in sides[1]]
        return sum((self.pos_embed(at_TM) * share_TM[:, :, None] for at_TM, share_TM in corners), torch.zeros((), device=grid_T4.device))


def feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The encoder's layers whose output becomes features, ascending. Raises `ModelConfigError`."""
    layers = config.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(layers, list) or layers != sorted(set(layers)):
        raise ModelConfigError(f"deepstack_visual_indexes in the model's config must be ascending numbers of layers, got {layers!r:.100}.")
    return tuple(layers)


def _with_encoder(text: ModelSpec, decoder: DecoderConfig, config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    vision = vision_config(config)
    if vision.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ModelConfigError(f"hidden_act of vision_config must be 'gelu_pytorch_tanh', got {vision['hidden_act']!r:.100}.")
    patches = PatchConfig.read(config)
    buffers = {f"patch_embed.{name}": value for name, value in normalization(patches).items()}
    width = positive_int(vision, "hidden_size")
    return with_encoder(
        text,
        decoder,
        config,
        dtype,
        lambda: Qwen3VisionEncoder(vision, patches),
        inputs=patch_inputs(patches),
        buffers={**buffers, "rotary_pos_emb.inv_freq": patch_frequencies(width // positive_int(vision, "num_heads"))},
        stored=stored_embedding("patch_embed.proj.weight", patches, width, dtype),
        max_item_tokens=patches.max_tokens,
        num_features=len(feature_layers(vision)),
    )


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    decoder = DecoderConfig.from_dict(text_config(config, rope_theta=5000000.0), default_head_dim=128)
    features = len(feature_layers(vision_config(config)))

    def make() -> nn.Module:
        layers = (LlamaDecoderLayer(decoder, Qwen3Attention(decoder)) for _ in range(decoder.num_hidden_layers))
        return VisionLanguageForCausalLM(decoder, layers, features)

    return _with_encoder(decoder_spec(make, decoder, config, dtype, tp_plan=DECODER_TP_PLAN), decoder, config, dtype)


def build_moe(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    text = text_config(config, rope_theta=5000000.0, norm_topk_prob=True)
    decoder, moe = DecoderConfig.from_dict(text, default_head_dim=128), MoeConfig.from_dict(text)
    features = len(feature_layers(vision_config(config)))

    def make() -> nn.Module:
        mlps = (MoeMlp(decoder, moe) if is_sparse else None for is_sparse in moe.sparse_layers)
        return VisionLanguageForCausalLM(decoder, (LlamaDecoderLayer(decoder, Qwen3Attention(decoder), mlp) for mlp in mlps), features)

    spec = _with_encoder(decoder_spec(make, decoder, config, dtype, tp_plan=MOE_TP_PLAN), decoder, config, dtype)
    if config.get("quantization_config"):
        raise ModelConfigError("Quantized checkpoints of Qwen3-VL-MoE are not supported: use one in bfloat16, with --quantization.")
    if not config.get("experts_have_inputs_first"):
        return spec
    stored = {
        name: ArrangedWeight(
            value=("swap_inputs_and_outputs", name),
            tensors=(StoredTensor(name=name, shape=(len(weight), weight.shape[2], weight.shape[1]), dtype=dtype),),
        )
        for name, weight in spec.module.named_parameters()
        if ".mlp.experts." in name
    }
    return replace(spec, quantized_weights=stored)


_FEATURES = ("full attention", "images")
register_model("Qwen3VLForConditionalGeneration", build, features=_FEATURES)
register_model("Qwen3VLMoeForConditionalGeneration", build_moe, features=(*_FEATURES, "experts"))

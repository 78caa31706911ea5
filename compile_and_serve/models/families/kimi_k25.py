"""Kimi-K2.5: DeepSeek-V3's decoder with images, from MoonViT's encoder (arXiv:2504.07491, section 2.1), whose table of positions is
interpolated to an image's size.

Videos, of which the encoder takes four frames together, are not read.

Shape legend: T tokens of the step (blocks of M patches, in the encoder), D width of the encoder, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor
from compile_and_serve.models.config import UnsupportedConfigError, number, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.deepseek import read
from compile_and_serve.models.families.deepseek_moe import DeepseekMoeModelConfig, deepseek_moe_layers, deepseek_moe_spec
from compile_and_serve.models.layers import RotaryEmbedding
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.decoder import VisionLanguageForCausalLM, with_encoder
from compile_and_serve.models.vision.patch_config import PaddedPatchConfig, vision_config
from compile_and_serve.models.vision.patches import (
    PatchEmbedding,
    PatchRope,
    flatten_inputs,
    normalization,
    patch_frequencies,
    patch_inputs,
    places_of_patches,
)
from compile_and_serve.models.vision.rope import text_config

_EPS = 1e-5  # of the encoder's norms
_CUBIC = -0.75  # the parameter of the interpolation's kernel, as torch has it
# What published files call a field of transformers' config class.
_PUBLISHED = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
# Fields that tell other encoders of the family from this one, and what they must be.
_KNOWN = {
    "hidden_act": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}


class PositionTable(nn.Module):
    """A table of positions, interpolated to each image's height and width by cubic convolution, between the centres of its cells."""

    def __init__(self, rows: int, columns: int, width: int, merge: int) -> None:
        super().__init__()
        self.sides, self.merge = (rows, columns), merge
        self.weight = nn.Parameter(torch.empty(rows, columns, width))

    def forward(self, grid_T4: torch.Tensor) -> torch.Tensor:
        """→ float32 [T, M, D]"""
        y_taps, x_taps = (
            _taps(place_TM, size_T1, side)
            for place_TM, size_T1, side in zip(
                places_of_patches(grid_T4, self.merge), (grid_T4[:, 2:3], grid_T4[:, 3:4]), self.sides, strict=True
            )
        )
        table, columns = self.weight.flatten(0, 1), self.sides[1]
        corners = [(y_TM * columns + x_TM, of_y_TM * of_x_TM) for y_TM, of_y_TM in y_taps for x_TM, of_x_TM in x_taps]
        return sum(
            (functional.embedding(at_TM, table) * share_TM[:, :, None] for at_TM, share_TM in corners),
            torch.zeros((), device=grid_T4.device),
        )


def _taps(place_TM: torch.Tensor, size_T1: torch.Tensor, side: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The four entries of a side of the table around each place, int64 [T, M], and their shares, float32 [T, M]."""
    at_TM = (place_TM.to(torch.float32) + 0.5) * side / size_T1 - 0.5
    low_TM = at_TM.floor()
    taps = []
    for offset in (-1, 0, 1, 2):
        far_TM = (at_TM - low_TM - offset).abs()
        inner_TM = ((_CUBIC + 2) * far_TM - (_CUBIC + 3)) * far_TM * far_TM + 1
        outer_TM = ((far_TM - 5) * far_TM + 8) * far_TM * _CUBIC - 4 * _CUBIC
        index_TM = (low_TM.to(torch.int64) + offset).clamp(0, side - 1)
        taps.append((index_TM, torch.where(far_TM <= 1, inner_TM, outer_TM)))
    return taps


class PlacedPatches(PatchEmbedding):
    """uint8 [T, M, F] and where the blocks stand → [T, M, D]"""

    def __init__(self, patches: PaddedPatchConfig, width: int, sides: tuple[int, int]) -> None:
        super().__init__(patches, width, bias=True)
        self.pos_emb = PositionTable(*sides, width, patches.merge)

    def forward(self, patches_TMF: torch.Tensor, grid_T4: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x_TMD = super().forward(patches_TMF)
        return x_TMD + self.pos_emb(grid_T4).to(x_TMD.dtype)


class PlaneRope(PatchRope):
    """cos and sin of patches: pairs of a head's dimensions turn with x and with y by turns."""

    def forward(self, grid_T4: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """→ float32 [T, M, 1, E / 2]"""
        y_TMF, x_TMF = (place_TM[:, :, None].to(torch.float32) * self.inv_freq for place_TM in places_of_patches(grid_T4, self.merge))
        angles = torch.stack((x_TMF, y_TMF), dim=-1).flatten(2)[:, :, None]
        return angles.cos(), angles.sin()


class VisionMlp(nn.Module):
    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(width, intermediate_size), nn.Linear(intermediate_size, width)

    def forward(self, x_TMD: torch.Tensor) -> torch.Tensor:
        return self.fc1(functional.gelu(self.fc0(x_TMD), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.norm0, self.norm1 = nn.LayerNorm(width, eps=_EPS), nn.LayerNorm(width, eps=_EPS)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = VisionMlp(width, intermediate_size)

    def forward(self, x_TMD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """cos, sin: [T, M, 1, E / 2]"""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.wqkv(self.norm0(x_TMD)).chunk(3, dim=-1))
        out_TMHE = encoder_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, self.head_dim**-0.5)
        x_TMD = x_TMD + self.wo(out_TMHE.flatten(2))
        return x_TMD + self.mlp(self.norm1(x_TMD))


def _turned(x_TMHE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Adjacent dimensions are a pair. In float32, as the encoder was trained."""
    a, b = x_TMHE.to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x_TMHE.dtype)


class VisionTower(nn.Module):
    """forward(patches uint8 [T, M, F], grid int32 [T, 4]) → [T, M, D]"""

    def __init__(self, config: Mapping[str, Any], patches: PaddedPatchConfig) -> None:
        super().__init__()
        width, num_heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
        intermediate_size = positive_int(config, "intermediate_size")
        self.patch_embed = PlacedPatches(patches, width, (positive_int(config, "pos_emb_height"), positive_int(config, "pos_emb_width")))
        self.rope = PlaneRope(width // num_heads, patches.merge)
        layers = (VisionBlock(width, num_heads, intermediate_size) for _ in range(positive_int(config, "num_hidden_layers")))
        self.encoder = nn.ModuleDict({"blocks": nn.ModuleList(layers), "final_layernorm": nn.LayerNorm(width, eps=_EPS)})

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        x_TMD = self.patch_embed(patches, grid)
        cos, sin = self.rope(grid)
        for block in self.encoder["blocks"]:  # type: ignore[attr-defined]
            x_TMD = block(x_TMD, cos, sin)
        return self.encoder["final_layernorm"](x_TMD)


class Projector(nn.Module):
    """The patches of a block become one row of the decoder. [T, M, D] → [T, out_size]"""

    def __init__(self, width: int, merged: int, out_size: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width, eps=eps)
        self.proj = nn.Sequential(nn.Linear(width * merged, width * merged), nn.GELU(), nn.Linear(width * merged, out_size))

    def forward(self, x_TMD: torch.Tensor) -> torch.Tensor:
        return self.proj(self.pre_norm(x_TMD).flatten(1))


class KimiVisionEncoder(nn.Module):
    """forward(patches uint8 [T, M, F], grid int32 [T, 4]) → rows [T, out_size]"""

    def __init__(self, config: Mapping[str, Any], patches: PaddedPatchConfig, out_size: int, eps: float) -> None:
        super().__init__()
        self.vision_tower = VisionTower(config, patches)
        self.mm_projector = Projector(positive_int(config, "hidden_size"), patches.merge**2, out_size, eps)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.mm_projector(self.vision_tower(patches, grid))


def _vision(config: Mapping[str, Any]) -> dict[str, Any]:
    """The encoder's config under transformers' names. Raises `ModelConfigError`."""
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "pos_emb_height": 64,
        "pos_emb_width": 64,
        **{_PUBLISHED.get(name, name): value for name, value in vision_config(config).items()},
    }
    for name, known in _KNOWN.items():
        if vision.get(name, known) != known:
            raise UnsupportedConfigError(f"{name} of vision_config must be {known!r}, got {vision[name]!r:.100}.")
    if positive_int(vision, "hidden_size") % (4 * positive_int(vision, "num_attention_heads")):
        raise UnsupportedConfigError("The encoder's head size must be a multiple of 4: RoPE turns half of the pairs with each side.")
    return vision


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    text, vision = text_config(config), _vision(config)
    if (kind := text.get("model_type", "deepseek_v3")) not in ("deepseek_v3", "kimi_k2"):
        raise UnsupportedConfigError(f"The decoder of Kimi-K2.5 must be one of DeepSeek-V3, got model_type {kind!r:.100}.")
    if config.get("quantization_config") is None and text.get("quantization_config") is not None:
        config = {**config, "quantization_config": text["quantization_config"]}
    parsed, patches = read({**text, "architectures": ["DeepseekV3ForCausalLM"]}), PaddedPatchConfig.read(config)
    width, name = positive_int(vision, "hidden_size"), "vision_tower.patch_embed.proj.weight"
    eps = number(config, "projection_layer_norm_eps", number(vision, "projector_ln_eps", _EPS))
    theta = number(vision.get("rope_parameters") or {}, "rope_theta", 10000.0)
    frequencies = patch_frequencies(width // positive_int(vision, "num_attention_heads"), theta)
    shape = (width, patches.channels, patches.patch_size, patches.patch_size)

    def make(parsed: DeepseekMoeModelConfig) -> nn.Module:
        return VisionLanguageForCausalLM(parsed.decoder, deepseek_moe_layers(parsed), rope=RotaryEmbedding)

    return with_encoder(
        deepseek_moe_spec(make, parsed, config, dtype),
        parsed.decoder,
        config,
        dtype,
        lambda: KimiVisionEncoder(vision, patches, parsed.decoder.hidden_size, eps),
        inputs=patch_inputs(patches),
        buffers={
            **{f"vision_tower.patch_embed.{key}": value for key, value in normalization(patches).items()},
            "vision_tower.rope.inv_freq": frequencies,
        },
        stored={name: ArrangedWeight(value=(flatten_inputs, name), tensors=(StoredTensor(name=name, shape=shape, dtype=dtype),))},
        max_item_tokens=patches.max_tokens,
        prefixes=("", "model."),
        parts_prefix="language_model.",
    )


for _name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"):  # published, and of transformers
    register_model(_name, build, features=("full attention", "experts", "images"))

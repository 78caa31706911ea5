"""OpenVLA (arXiv:2406.09246): Llama 2 sees an image through DINOv2 and SigLIP side by side, and answers with tokens that mean an action.

The towers have the layout of timm's `VisionTransformer`. An encoder's step has the class token and the registers of an image before its
patches; the tower that has none attends to the patches alone.

Shape legend: T tokens of the step (patches, and rows before them, in the encoder), F values of a patch, D width of a tower, P patches of an
image, L rows before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.models.config import DecoderConfig, UnsupportedConfigError
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from compile_and_serve.models.layers import RotaryEmbedding
from compile_and_serve.models.meta_device import meta_device
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.decoder import VisionLanguageForCausalLM, with_encoder
from compile_and_serve.models.vision.names import PATCHES
from compile_and_serve.models.vision.openvla_config import OpenVLAConfig, TimmTower
from compile_and_serve.models.vision.patches import array_input, flatten_inputs, normalization
from compile_and_serve.models.vision.rope import text_config

_EPS = 1e-6  # of timm's norms
# Of the class LlamaConfig, which config.json leaves out.
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
_POOLING = [f"attn_pool.{name}.{kind}" for name in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2") for kind in ("weight", "bias")]


class TowerAttention(nn.Module):
    """Attention of rows to those of their segment. [T, D] → the same"""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_TD: torch.Tensor, ends_T: torch.Tensor | None, max_segment: int) -> torch.Tensor:
        q_THE, k_THE, v_THE = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_TD).chunk(3, dim=-1))
        return self.proj(encoder_attention(q_THE, k_THE, v_THE, self.head_dim**-0.5, ends_T=ends_T, max_segment=max_segment).flatten(1))


class TowerMlp(nn.Module):
    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, intermediate_size), nn.Linear(intermediate_size, width)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x_TD)))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.empty(width))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD * self.scale_factor


class TowerBlock(nn.Module):
    def __init__(self, tower: TimmTower) -> None:
        super().__init__()
        width = tower.width
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=_EPS), nn.LayerNorm(width, eps=_EPS)
        self.attn, self.mlp = TowerAttention(width, tower.num_heads), TowerMlp(width, tower.intermediate_size)
        self.ls1, self.ls2 = (LayerScale(width) if tower.scales else nn.Identity() for _ in range(2))

    def forward(self, x_TD: torch.Tensor, ends_T: torch.Tensor | None, max_segment: int) -> torch.Tensor:
        x_TD = x_TD + self.ls1(self.attn(self.norm1(x_TD), ends_T, max_segment))
        return x_TD + self.ls2(self.mlp(self.norm2(x_TD)))


class Tower(nn.Module):
    """What its second last block gives. leading: L of the step; the tower itself has L such rows, or none."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, tower: TimmTower, leading: int) -> None:
        super().__init__()
        self.leading, self.num_patches = leading, tower.patches.num_patches
        self.sees_leading = tower.leading == leading
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(tower.patches.values, tower.width)})
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_patches, tower.width))
        if tower.leading:
            self.cls_token = nn.Parameter(torch.empty(1, 1, tower.width))
        if tower.leading > 1:
            self.reg_token = nn.Parameter(torch.empty(1, tower.leading - 1, tower.width))
        self.blocks = nn.ModuleList(TowerBlock(tower) for _ in range(tower.depth - 1))
        for name, value in normalization(tower.patches).items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, patches_TF: torch.Tensor, places_T: torch.Tensor, ends_T: torch.Tensor | None) -> torch.Tensor:
        x_TF = (patches_TF.to(torch.float32) * (1 / 255) - self.mean) / self.std
        x_TD = self.patch_embed["proj"](x_TF.to(self.pos_embed.dtype)) + self.pos_embed[0][(places_T - self.leading).clamp(min=0)]
        own_LD = [tokens[0] for tokens in (getattr(self, name, None) for name in ("cls_token", "reg_token")) if tokens is not None]
        if own_LD:
            tokens_TD = torch.cat(own_LD)[places_T.clamp(max=self.leading - 1)]
            x_TD = torch.where((places_T < self.leading)[:, None], tokens_TD, x_TD)
        segments = (None, 0) if self.sees_leading else (ends_T, self.num_patches)
        for block in self.blocks:
            x_TD = block(x_TD, *segments)
        return x_TD


class Projector(nn.Module):
    """Of one tower, two linears; of both, three."""

    def __init__(self, width: int, out_size: int, *, is_fused: bool) -> None:
        super().__init__()
        inner = 4 * width if is_fused else out_size
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, out_size)
        self.fc3 = nn.Linear(out_size, out_size) if is_fused else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = self.fc2(functional.gelu(self.fc1(x_TD)))
        return x_TD if self.fc3 is None else self.fc3(functional.gelu(x_TD))


class OpenVLAEncoder(nn.Module):
    """forward(patches uint8 [T, F], places int64 [T], patch_ends int32 [T]) → rows [T, out_size]

    places: of each row among those of its image. patch_ends: where the L rows of each image end, and where its patches do, for towers
    that read only patches.
    """

    def __init__(self, config: OpenVLAConfig, out_size: int) -> None:
        super().__init__()
        self.vision_backbone = nn.ModuleDict({tower.name: Tower(tower, config.leading) for tower in config.towers})
        width = sum(tower.width for tower in config.towers)
        self.projector = Projector(width, out_size, is_fused=len(config.towers) > 1)

    def forward(self, patches: torch.Tensor, places: torch.Tensor, patch_ends: torch.Tensor | None = None) -> torch.Tensor:
        features = [tower(patches, places, patch_ends) for tower in self.vision_backbone.values()]
        return self.projector(torch.cat(features, dim=-1))


def _encoder_inputs(config: OpenVLAConfig) -> tuple[StepInput, ...]:
    leading, last = config.leading, config.leading + config.patches.num_patches - 1

    def places(batch: TokenBatch) -> np.ndarray:
        return np.minimum(batch.positions, last)

    def patch_ends(batch: TokenBatch) -> np.ndarray:
        starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
        distinct = np.unique(np.concatenate((np.minimum(starts + leading, ends), ends)))
        return np.concatenate((distinct, np.full(max(0, len(batch.token_ids) - len(distinct)), distinct[-1]))).astype(np.int32)

    common = (
        array_input(PATCHES, torch.uint8, (config.patches.values,)),
        StepInput(name="places", dtype=torch.int64, dims=(TOKENS,), fill=places),
    )
    if all(tower.leading == leading for tower in config.towers):
        return common
    return (*common, StepInput(name="patch_ends", dtype=torch.int32, dims=(TOKENS,), fill=patch_ends, ends_segments=True))


def _unused(tower: TimmTower) -> list[str]:
    """Tensors of a tower behind its second last block."""
    with meta_device():
        of_block = [f"blocks.{tower.depth - 1}.{name}" for name, _ in TowerBlock(tower).named_parameters()]
    names = [*of_block, "norm.weight", "norm.bias", "attn_pool.latent", *_POOLING]
    return [f"vision_backbone.{tower.name}.{name}" for name in names]


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    openvla, text = OpenVLAConfig.read(config), text_config(config, **_LLAMA)
    if text.get("model_type", "llama") != "llama":
        raise UnsupportedConfigError(f"OpenVLA runs with a language model of the type 'llama', got {text['model_type']!r:.100}.")
    decoder = DecoderConfig.from_dict(text)

    def make() -> nn.Module:
        layers = (LlamaDecoderLayer(decoder) for _ in range(decoder.num_hidden_layers))
        return VisionLanguageForCausalLM(decoder, layers, rope=RotaryEmbedding)

    buffers: dict[str, torch.Tensor] = {}
    stored: dict[str, StoredWeight] = {}
    for tower in openvla.towers:
        module, patches = f"vision_backbone.{tower.name}", tower.patches
        buffers |= {f"{module}.{key}": value for key, value in normalization(patches).items()}
        name, shape = f"{module}.patch_embed.proj.weight", (tower.width, patches.channels, patches.patch_size, patches.patch_size)
        stored[name] = ArrangedWeight(value=(flatten_inputs, name), tensors=(StoredTensor(name=name, shape=shape, dtype=dtype),))
    return with_encoder(
        decoder_spec(make, decoder, config, dtype),
        decoder,
        config,
        dtype,
        lambda: OpenVLAEncoder(openvla, decoder.hidden_size),
        inputs=_encoder_inputs(openvla),
        buffers=buffers,
        stored=stored,
        max_item_tokens=openvla.patches.num_patches,
        leading_rows=openvla.leading,
        prefixes=("",),
        unused=[name for tower in openvla.towers for name in _unused(tower)],
    )


register_model("OpenVLAForActionPrediction", build, features=("full attention", "images", "robot actions"))

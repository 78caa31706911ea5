"""Inputs of encoders of images in patches, and the layers that Qwen's encoders share.

A token of an encoder's step is a block of M patches, which the encoder merges into one row. Its patches are in the order of rows of the
block. Items may come in any order of their blocks; each says where it stands.

Shape legend: T tokens of the step, M patches of a block, F values of a patch (channels × frames × height × width), D width of the encoder,
H heads, E head size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import ArrayInfo
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.layers import rotate_half
from compile_and_serve.models.vision.names import GRID, PATCHES
from compile_and_serve.models.vision.patch_config import PatchConfig, TowerConfig


def patch_inputs(patches: PatchConfig) -> tuple[StepInput, ...]:
    """The blocks' patches and where each block stands: (y, x, height, width) in patches, of its first patch and of the image."""
    block = (patches.merge**2, patches.values)
    return array_input(PATCHES, torch.uint8, block), array_input(GRID, torch.int32, (4,))


def normalization(patches: PatchConfig | TowerConfig) -> dict[str, torch.Tensor]:
    """float32 [F]: the buffers of a `PatchEmbedding`."""
    repeat = patches.values // patches.channels
    return {name: torch.tensor(values).repeat_interleave(repeat) for name, values in (("mean", patches.mean), ("std", patches.std))}


def array_input(name: str, dtype: torch.dtype, row_shape: tuple[int, ...]) -> StepInput:
    """An input that has the rows of the items' arrays of its name."""

    def write(batch: TokenBatch, array: np.ndarray) -> None:
        batch.write_rows_of(name, array)

    info = ArrayInfo(name=name, row_shape=row_shape, is_floating=dtype.is_floating_point)
    return StepInput(name=name, dtype=dtype, dims=(TOKENS, *row_shape), write=write, arrays=(info,))


class PatchEmbedding(nn.Module):
    """uint8 [T, M, F] → [T, M, D]. proj: of checkpoints it is a convolution whose kernel is as large as a patch (`stored_embedding`)."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, patches: PatchConfig, width: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(patches.values, width, bias=bias)
        for name, value in normalization(patches).items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, patches_TMF: torch.Tensor) -> torch.Tensor:
        x_TMF = (patches_TMF.to(torch.float32) * (1 / 255) - self.mean) / self.std
        return self.proj(x_TMF.to(self.proj.weight.dtype))


def stored_embedding(name: str, patches: PatchConfig, width: int, dtype: torch.dtype) -> dict[str, StoredWeight]:
    """How checkpoints hold the weight of a `PatchEmbedding`, which is called `name`."""
    shape = (width, patches.channels, patches.frames, patches.patch_size, patches.patch_size)
    return {name: ArrangedWeight(value=(flatten_inputs, name), tensors=(StoredTensor(name=name, shape=shape, dtype=dtype),))}


flatten_inputs = "flatten_inputs"  # the weight function of a convolution that is a product


@weight_function(flatten_inputs)
def _flatten_inputs(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1)


def places_of_patches(grid_T4: torch.Tensor, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """→ y, x of each patch: int32 [T, M]"""
    offsets_M = torch.arange(merge * merge, dtype=grid_T4.dtype, device=grid_T4.device)
    return grid_T4[:, :1] + offsets_M // merge, grid_T4[:, 1:2] + offsets_M % merge


class PatchRope(nn.Module):
    """cos and sin of patches: half of a head's frequencies turn with y, half with x."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, merge: int) -> None:
        super().__init__()
        self.merge = merge
        self.register_buffer("inv_freq", patch_frequencies(head_dim), persistent=False)

    def forward(self, grid_T4: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """→ float32 [T, M, E]"""
        turns = [place_TM[:, :, None].to(torch.float32) * self.inv_freq for place_TM in places_of_patches(grid_T4, self.merge)]
        angles_TME = torch.cat((*turns, *turns), dim=-1)
        return angles_TME.cos(), angles_TME.sin()


def patch_frequencies(head_dim: int, theta: float = 10000.0) -> torch.Tensor:
    """float32 [E / 4]"""
    return 1.0 / (theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)))


class PatchAttention(nn.Module):
    """Attention of patches to those of their item, or of their window. [T, M, D] → the same"""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self, x_TMD: torch.Tensor, cos_TME: torch.Tensor, sin_TME: torch.Tensor, ends_T: torch.Tensor | None = None, max_window: int = 0
    ) -> torch.Tensor:
        q_TMHE, k_TMHE, v_TMHE = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_TMD).chunk(3, dim=-1))
        q_TMHE, k_TMHE = _rotated(q_TMHE, cos_TME, sin_TME), _rotated(k_TMHE, cos_TME, sin_TME)
        scale = self.head_dim**-0.5
        out_TMHE = encoder_attention(q_TMHE, k_TMHE, v_TMHE, scale, ends_T=ends_T, max_segment=max_window)
        return self.proj(out_TMHE.flatten(2))


def _rotated(x_TMHE: torch.Tensor, cos_TME: torch.Tensor, sin_TME: torch.Tensor) -> torch.Tensor:
    """In float32, as the encoders were trained."""
    wide = x_TMHE.to(torch.float32)
    return (wide * cos_TME[:, :, None] + rotate_half(wide) * sin_TME[:, :, None]).to(x_TMHE.dtype)

"""Layers that the model families share: rotary position embedding and the gated MLP.

Shape legend: T tokens of the step, D hidden size, X heads of any kind, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError

ROPE_TYPES = ("default", "linear", "llama3", "divisors")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """θ^(-2i/E) for i < E/2, scaled according to `rope["rope_type"]`. → float32 [E/2]

    "linear" divides by `factor` (position interpolation, arXiv:2306.15595). "llama3" divides only the long wavelengths, with
    a smooth transition (Llama 3.1's reference code). "divisors" divides by a given list, which GGUF files store for llama3.
    Raises `ModelConfigError` for another type or a missing parameter.
    """
    rope_type = rope["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise UnsupportedConfigError(
            f"RoPE type {rope_type!r} is not supported: expected one of {', '.join(ROPE_TYPES)}."
        )
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (_rope_parameter(rope, "rope_theta") ** exponents)
    if rope_type == "linear":
        return frequencies / _rope_parameter(rope, "factor")
    if rope_type == "llama3":
        factor = _rope_parameter(rope, "factor")
        low, high = _rope_parameter(rope, "low_freq_factor"), _rope_parameter(rope, "high_freq_factor")
        turns = _rope_parameter(rope, "original_max_position_embeddings") * frequencies / (2 * math.pi)
        unscaled_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - unscaled_share) * frequencies / factor + unscaled_share * frequencies
    if rope_type == "divisors":
        return frequencies / torch.tensor(_required(rope, "divisors"), dtype=torch.float32)
    return frequencies


def max_positions(config: DecoderConfig) -> int:
    """Longest sequence that the positions encode.

    Linear scaling multiplies max_position_embeddings; llama3's max_position_embeddings already includes its scaling.
    """
    factor = _rope_parameter(config.rope, "factor") if config.rope["rope_type"] == "linear" else 1.0
    return int(config.max_position_embeddings * factor)


def _rope_parameter(rope: Mapping[str, Any], name: str) -> float:
    return float(_required(rope, name))


def _required(rope: Mapping[str, Any], name: str) -> Any:
    if rope.get(name) is None:
        raise ModelConfigError(f"RoPE type {rope['rope_type']!r} needs {name!r}, which the model's config lacks.")
    return rope[name]


class RotaryEmbedding(nn.Module):
    """cos and sin of every position's angles. Computed once per forward and shared by the layers."""

    inv_freq: torch.Tensor

    def __init__(self, config: DecoderConfig, rope: Mapping[str, Any] | None = None) -> None:
        """rope: in place of the config's."""
        super().__init__()
        frequencies = inverse_frequencies(config.rope if rope is None else rope, config.head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [T]. → cos, sin: [T, E] in `dtype`, computed in float32. Their two halves are equal."""
        angles = positions_T[:, None].to(torch.float32) * self.inv_freq
        angles_TE = torch.cat((angles, angles), dim=-1)
        return angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)


def rotate_half(x_TXE: torch.Tensor) -> torch.Tensor:
    first, second = x_TXE.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(x_TXE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + E/2) of every head by its position's angle (RoFormer, arXiv:2104.09864; half-split layout)."""
    return x_TXE * cos_TE[:, None] + rotate_half(x_TXE) * sin_TE[:, None]


class GatedMlp(nn.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU, arXiv:2002.05202). [T, D] → [T, D]"""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))

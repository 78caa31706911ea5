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

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "divisors")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """θ^(-2i/E) for i < E/2, scaled according to `rope["rope_type"]`. → float32 [E/2]

    "linear" divides by `factor` (position interpolation, arXiv:2306.15595). "llama3" divides only the long wavelengths, with
    a smooth transition (Llama 3.1's reference code). "yarn" likewise, with a transition that is linear in i (arXiv:2309.00071).
    "divisors" divides by a given list, which GGUF files store for llama3.
    Raises `ModelConfigError` for another type or a missing parameter.
    """
    rope_type = rope["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise UnsupportedConfigError(f"RoPE type {rope_type!r} is not supported: expected one of {', '.join(ROPE_TYPES)}.")
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
    if rope_type == "yarn":
        divided_share = _yarn_divided_share(rope, head_dim)
        return frequencies * (1 - divided_share) + frequencies / _rope_parameter(rope, "factor") * divided_share
    if rope_type == "divisors":
        return frequencies / torch.tensor(_required(rope, "divisors"), dtype=torch.float32)
    return frequencies


def _yarn_divided_share(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """0 for dimensions that turn at least beta_fast times within the original length, 1 for at most beta_slow times. → float32 [E/2]"""
    theta, length = _rope_parameter(rope, "rope_theta"), _rope_parameter(rope, "original_max_position_embeddings")

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(float(rope.get("beta_fast") or 32)), dimension_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rope_magnitude(rope: Mapping[str, Any]) -> float:
    """The factor of cos and sin: 1, except for YaRN."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return _rope_parameter(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_magnitude(rope, "mscale") / yarn_magnitude(rope, "mscale_all_dim")
    return yarn_magnitude(rope)


def yarn_magnitude(rope: Mapping[str, Any], mscale: str | None = None) -> float:
    """0.1 · m · ln(factor) + 1, where m is the parameter called `mscale`; None: 1."""
    factor = _rope_parameter(rope, "factor")
    return 0.1 * (1.0 if mscale is None else _rope_parameter(rope, mscale)) * math.log(factor) + 1.0 if factor > 1 else 1.0


def max_positions(config: DecoderConfig) -> int:
    """Longest sequence that the positions encode."""
    return scaled_positions(config.rope, config.max_position_embeddings)


def scaled_positions(rope: Mapping[str, Any], max_position_embeddings: int) -> int:
    """What a scaling extends the positions to.

    Linear and dynamic scaling multiply max_position_embeddings. YaRN multiplies its original length, and may be written into a config.json
    without a change of max_position_embeddings, as model cards say; max_position_embeddings of llama3 includes the scaling.
    """
    if rope["rope_type"] in ("linear", "dynamic"):
        return int(max_position_embeddings * _rope_parameter(rope, "factor"))
    if rope["rope_type"] != "yarn" or rope.get("original_max_position_embeddings") is None:
        return max_position_embeddings
    return max(max_position_embeddings, int(_rope_parameter(rope, "original_max_position_embeddings") * _rope_parameter(rope, "factor")))


def _rope_parameter(rope: Mapping[str, Any], name: str) -> float:
    value = _required(rope, name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelConfigError(f"{name} of the RoPE parameters in the model's config must be a number, got {value!r}.")
    return float(value)


def _required(rope: Mapping[str, Any], name: str) -> Any:
    if rope.get(name) is None:
        raise ModelConfigError(f"RoPE type {rope['rope_type']!r} needs {name!r}, which the model's config lacks.")
    return rope[name]


class RotaryEmbedding(nn.Module):
    """cos and sin of every position's angles. Computed once per forward and shared by the layers. E: `config.rope_size`."""

    inv_freq: torch.Tensor

    def __init__(self, config: DecoderConfig, rope: Mapping[str, Any] | None = None) -> None:
        """rope: in place of the config's."""
        super().__init__()
        rope = config.rope if rope is None else rope
        with torch.device("cpu"):  # arithmetic on the meta device would import Dynamo, for two seconds
            frequencies = inverse_frequencies(rope, config.rope_size)
        self.magnitude = rope_magnitude(rope)
        self.register_buffer("inv_freq", frequencies.to(torch.empty(0).device), persistent=False)

    def forward(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [T]. → cos, sin: [T, E] in `dtype`, computed in float32. Their two halves are equal."""
        angles = positions_T[:, None].to(torch.float32) * self.inv_freq
        angles_TE = torch.cat((angles, angles), dim=-1)
        cos_TE, sin_TE = angles_TE.cos(), angles_TE.sin()
        if self.magnitude != 1.0:
            cos_TE, sin_TE = cos_TE * self.magnitude, sin_TE * self.magnitude
        return cos_TE.to(dtype), sin_TE.to(dtype)


def rotate_half(x_TXE: torch.Tensor) -> torch.Tensor:
    first, second = x_TXE.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(x_TXE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + E/2) of every head by its position's angle (RoFormer, arXiv:2104.09864; half-split layout).

    cos and sin of fewer dimensions rotate the first ones of every head; the others stay as they are.
    """
    size = cos_TE.shape[-1]
    if size < x_TXE.shape[-1]:
        return torch.cat((apply_rope(x_TXE[..., :size], cos_TE, sin_TE), x_TXE[..., size:]), dim=-1)
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

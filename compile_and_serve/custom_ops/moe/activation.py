"""The activations of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = ("silu", "clamped_swiglu")
CLAMPED_SWIGLU_ALPHA = 1.702


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """silu(gate) · up; or with "clamped_swiglu" min(gate, limit) · σ(1.702 · min(gate, limit)) · (clamp(up, ±limit) + 1)."""
    if activation == "silu":
        return F.silu(gate) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate) * (up.clamp(-limit, limit) + 1)

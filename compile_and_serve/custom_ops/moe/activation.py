"""The activations of experts, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = ("silu", "clamped_swiglu", "relu2")
CLAMPED_SWIGLU_ALPHA = 1.702


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """silu(gate) · up; or with "clamped_swiglu" min(gate, limit) · σ(1.702 · min(gate, limit)) · (clamp(up, ±limit) + 1)."""
    if activation == "silu":
        return F.silu(gate) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate) * (up.clamp(-limit, limit) + 1)


def num_parts(activation: str) -> int:
    """How many times the intermediate features the first linear of an expert has: gate and up, or with "relu2" up alone."""
    return 1 if activation == "relu2" else 2


def activate_rows(rows: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """`activate` of gate and up, which lie side by side; or with "relu2" relu(up)². [R, F · parts] → [R, F]"""
    if activation == "relu2":
        return F.relu(rows).square()
    gate, up = rows.chunk(2, dim=-1)
    return activate(gate, up, activation, limit)

"""Medusa heads (arXiv:2401.10774): head n predicts the n-th token after the next one, from the target's last hidden state alone.

Shape legend: T rows, D hidden size, N heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """x + silu(linear(x))"""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD + F.silu(self.linear(x_TD))


class MedusaHeads(nn.Module):
    """forward(hidden_states [T, D]) → int64 [T, N], the likeliest token of each head."""

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.medusa_head = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_blocks)), nn.Linear(hidden_size, vocab_size, bias=False))
            for _ in range(num_heads)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(hidden_states).argmax(dim=-1) for head in self.medusa_head], dim=-1)

"""An EAGLE-3 head as it is trained: several chained steps, each of which reads what the step before gave (arXiv:2503.01840, section 3.2).

Shape legend: B sequences, N entries of each, D hidden size, H heads, E head size, V vocabulary of the drafts, J chained steps.

Entry i reads the hidden state of token i and the embedding of token i + 1, and predicts token i + 2. In step j, entry i ends a chain that
began at entry i - j. It reads what step j - 1 gave at entry i - 1, and attends to the first step's keys up to entry i - j and to one key of
each later step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.draft_head.target import Target, rotated

MLP_SIZE = 384


class Norm(nn.Module):
    """An RMS norm in float32, whatever it is given."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Eagle3Head(nn.Module):
    """Weights in float32. The output head is rows of the target's embedding."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        size, kv_size, eps = target.hidden_size, target.num_kv_heads * target.head_dim, target.eps
        self.num_heads, self.num_kv_heads, self.head_dim = target.num_heads, target.num_kv_heads, target.head_dim
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * size, one, bias=False) for one in (size, kv_size, kv_size))
        self.o_proj = nn.Linear(size, size, bias=False)
        self.post_attention_layernorm = Norm(size, eps)
        self.gate_proj, self.up_proj = (nn.Linear(size, MLP_SIZE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(MLP_SIZE, size, bias=False)
        self.norm = Norm(size, eps)
        self.to(target.device)
        with torch.no_grad():  # it begins with what the last tapped layer says
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, 2 * size :] += torch.eye(size, device=target.device)
            self.norm.weight.copy_(target.norm_D.float())

    def forward(
        self, embeddings_BND: torch.Tensor, taps_BNF: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], steps: int
    ) -> Iterator[torch.Tensor]:
        """Yields each step's hidden states [B, N, D], normed for the output head."""
        embedded = self.input_layernorm(embeddings_BND)
        hidden = self.fc(taps_BNF)
        cos, sin = rope
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(steps):
            normed = self.hidden_norm(hidden)
            x = torch.cat((embedded, normed), dim=-1)
            q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
            groups = self.num_heads // self.num_kv_heads
            keys.append(rotated(k, cos, sin).repeat_interleave(groups, dim=1))
            values.append(v.repeat_interleave(groups, dim=1))
            mixed = _attention(rotated(q, cos, sin), keys, values, step)
            x = normed + self.o_proj(mixed.transpose(1, 2).flatten(2))
            y = self.post_attention_layernorm(x)
            x = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
            yield self.norm(x)
            hidden = _later(x, 1, dim=1)


def _later(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Each entry's value at the entry `count` after it; zeros come first."""
    if count == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat((zeros, x.narrow(dim, 0, x.shape[dim] - count)), dim=dim)


def _attention(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], step: int) -> torch.Tensor:
    """[B, H, N, E]. keys, values: of each step so far."""
    q = q * q.shape[-1] ** -0.5
    num = q.shape[2]
    is_hidden = torch.ones(num, num, dtype=torch.bool, device=q.device).triu(1 - step)
    scores = (q @ keys[0].transpose(2, 3)).masked_fill(is_hidden, -torch.inf)
    own = [(q * _later(keys[one], step - one, dim=2)).sum(-1, keepdim=True) for one in range(1, step + 1)]
    chances = torch.cat((scores, *own), dim=-1).float().softmax(-1).to(q.dtype)
    mixed = chances[..., :num] @ values[0].to(q.dtype)
    for one in range(1, step + 1):
        mixed = mixed + chances[..., num + one - 1, None] * _later(values[one], step - one, dim=2)
    return mixed

"""Medusa heads (arXiv:2401.10774): head n predicts the n-th token after the next one, from the target's last hidden state alone.

Shape legend: T rows, D hidden size, N heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.step import TOKENS, StepOutput
from compile_and_serve.models.config import ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import on_meta
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec, checked_target, hidden_input
from compile_and_serve.models.drafters.hidden_states import hidden_size_of, num_layers_of, with_hidden_states
from compile_and_serve.models.spec import ModelSpec

DRAFT_TOKENS = "draft_tokens"  # the output of Medusa heads


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


def medusa(config: Mapping[str, Any], target: ModelSpec, *, dtype: torch.dtype) -> DrafterSpec:
    """Medusa heads. Raises `ModelConfigError` with one sentence for a wrong config."""
    size, num_heads = hidden_size_of(target), positive_int(config, "medusa_num_heads")
    blocks = positive_int(config, "medusa_num_layers", 1)
    given = positive_int(config, "hidden_size", size), positive_int(config, "vocab_size", target.vocab_size)
    if given != (size, target.vocab_size):
        raise ModelConfigError(
            f"The Medusa heads are for a hidden size of {given[0]} and {given[1]} tokens, and the model has {size} and "
            f"{target.vocab_size}: use heads that were trained for this model."
        )
    module = on_meta(lambda: MedusaHeads(size, target.vocab_size, num_heads, blocks), dtype)
    names = [name for name, _ in module.named_parameters()]
    spec = ModelSpec(
        module=module,
        config={**config, "hidden_size": size, "vocab_size": target.vocab_size},
        state=(),
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        weight_map={name.removeprefix("medusa_head."): name for name in names},
        tp_plan={"medusa_head.*.linear": "replicated", "medusa_head.*": "vocab"},  # so all ranks draft the same tokens
        inputs=(hidden_input(size, dtype),),
        outputs=(StepOutput(name=DRAFT_TOKENS, dims=(TOKENS, num_heads)),),
    )
    return DrafterSpec(
        spec=spec, target=with_hidden_states(checked_target(target), (num_layers_of(target),)), hidden_size=size, max_tokens=num_heads
    )

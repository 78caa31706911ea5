"""Counts how many tokens each expert of each layer gets, on request.

Counting launches small kernels beside every call of `cas::experts`, so it is off by default. CUDA graphs count only if they were captured
while counting was on. A layer is known by the address of its weights, because compiled pieces do not know their layer.

Shape legend: T tokens, K experts of a token, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class LayerLoad:
    """One layer's counts, on its device.

    tokens: int64 [X], tokens of each expert since counting began. distinct: tokens per call → the number of experts that had a token,
    summed over these calls, and the number of calls (int64 [] each).
    """

    tokens: torch.Tensor
    distinct: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add(self, ids_TK: torch.Tensor) -> None:
        """Count the ids of one call. The host does not wait."""
        flat = ids_TK.reshape(-1).long()
        here = torch.zeros_like(self.tokens).scatter_add_(0, flat, torch.ones_like(flat))
        self.tokens += here
        num_tokens = ids_TK.shape[0]
        if num_tokens not in self.distinct:
            self.distinct[num_tokens] = self.tokens.new_zeros(()), self.tokens.new_zeros(())
        total, calls = self.distinct[num_tokens]
        total += here.count_nonzero()
        calls += 1

    def mean_distinct(self, num_tokens: int) -> float:
        """Experts that had a token in a call of num_tokens, on average. NaN without such a call."""
        if num_tokens not in self.distinct:
            return float("nan")
        total, calls = self.distinct[num_tokens]
        return total.item() / max(1, calls.item())


_layers: dict[int, LayerLoad] | None = None


def count_call(ids_TK: torch.Tensor, down: torch.Tensor) -> None:
    """Count one call of `cas::experts`, if counting is on. down: the layer's weight [X, …]."""
    if _layers is None:
        return
    address = down.data_ptr()
    if address not in _layers:
        _layers[address] = LayerLoad(torch.zeros(down.shape[0], dtype=torch.int64, device=ids_TK.device))
    _layers[address].add(ids_TK)


@contextmanager
def counting_experts() -> Iterator[dict[int, LayerLoad]]:
    """Count inside the block. → the layers' loads, in the order in which the layers first ran"""
    global _layers
    previous, _layers = _layers, {}
    try:
        yield _layers
    finally:
        _layers = previous

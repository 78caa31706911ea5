"""A stand-in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class FakeGraph:
    """Replays by running the captured function again and copying what it returns into the first outputs."""

    def __init__(self, fn: Callable[[], Sequence[torch.Tensor]], outputs: tuple[torch.Tensor, ...]) -> None:
        self.fn, self.outputs, self.num_replays = fn, outputs, 0

    def replay(self) -> None:
        self.num_replays += 1
        for static, fresh in zip(self.outputs, self.fn(), strict=True):
            static.copy_(fresh)


class FakeDevice:
    bytes_per_graph = 10

    def __init__(self) -> None:
        self.used = 0

    def capture(
        self, fn: Callable[[], Sequence[torch.Tensor]], *, keep_outputs: bool = False
    ) -> tuple[FakeGraph, tuple[torch.Tensor, ...], float]:
        outputs = tuple(fn())
        self.used += 1000
        return FakeGraph(fn, outputs), outputs, 0.5

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    def used_bytes(self) -> int:
        return self.used

    def peak_bytes(self, fn: Callable[[], None]) -> int:
        fn()
        return 777

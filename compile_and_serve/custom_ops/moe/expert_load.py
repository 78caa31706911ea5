"""Counts how many tokens each expert of each layer gets, on request: `counting_experts` for a few steps, `ExpertLoad` while serving.

Counting launches small kernels beside every call of `cas::experts`, so it is off by default. CUDA graphs count only if they were captured
while counting was on. A layer is known by the address of its weights, because compiled pieces do not know their layer.

Shape legend: T tokens, K experts of a token, X experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch

from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import TimedEvent

READ_SECONDS = 1.0  # between two reads of `ExpertLoad`


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


class ExpertLoad:
    """The tokens of each expert of each layer since the start, without padding and synthetic steps. The host never waits for them.

    num_groups: of data-parallel attention, whose tokens lie behind one another in a call.

    Every layer must run once outside graph captures before it runs in one. read_steps: steps after which they are read, whatever the time.
    """

    def __init__(self, device: torch.device, read_steps: int | None = None, num_groups: int = 1) -> None:
        self._read_steps, self._steps_since_read = read_steps, 0
        self._num_tokens = torch.zeros(num_groups, dtype=torch.int32, device=device)  # that count
        self._layers: list[torch.Tensor] = []  # int64 [X] each, in the order in which the layers first ran
        self._index: dict[int, int] = {}  # address of a layer's weights → place in `_layers`
        self._platform = platform_of(device)
        self._started_at = float("-inf")  # the last read (time.monotonic)
        self._read: tuple[Sequence[torch.Tensor], TimedEvent] | None = None  # on its way to the host

    @property
    def num_layers(self) -> int:
        """Layers with experts that have run."""
        return len(self._layers)

    def begin_step(self, *num_tokens: int) -> None:
        """Count the first num_tokens tokens of each group in the next calls of each layer: 0 for synthetic steps."""
        self._steps_since_read += any(num_tokens)
        if len(set(num_tokens)) == 1:
            self._num_tokens.fill_(num_tokens[0])
        else:
            self._num_tokens.copy_(self._platform.upload(np.array(num_tokens, dtype=np.int32)))

    def forget_addresses(self) -> None:
        """The weights move. The layers run in the same order as before."""
        self._index.clear()

    def add(self, ids_TK: torch.Tensor, down: torch.Tensor) -> None:
        """Count one call of `cas::experts`."""
        address = down.data_ptr()
        if address not in self._index:
            self._index[address] = len(self._index)
            if len(self._layers) < len(self._index):
                self._layers.append(torch.zeros(down.shape[0], dtype=torch.int64, device=ids_TK.device))
        positions_T = torch.arange(len(ids_TK), dtype=torch.int32, device=ids_TK.device)
        counts_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
        limits = self._num_tokens
        if len(limits) > 1:  # the tokens of all groups, each with as many rows
            rows = len(ids_TK) // len(limits)
            positions_T, limits = positions_T % rows, limits.repeat_interleave(rows, output_size=len(ids_TK))[:, None]
        torch.lt(positions_T[:, None].expand_as(ids_TK), limits, out=counts_TK)
        self._layers[self._index[address]].index_add_(0, ids_TK.reshape(-1), counts_TK.view(-1))

    def read(self) -> list[list[int]]:
        """Tokens of each expert of each layer, as they were at one of the last steps; empty if it is too early to read them again."""
        is_due = time.monotonic() - self._started_at >= READ_SECONDS
        is_due |= self._read_steps is not None and self._steps_since_read >= self._read_steps
        if self._read is None and self._layers and is_due:
            self._started_at, self._steps_since_read = time.monotonic(), 0
            counts = self._platform.download(torch.cat(self._layers)).split([len(layer) for layer in self._layers])
            self._read = counts, self._platform.record_timed_event()
        if self._read is None or not self._read[1].query():
            return []
        counts, self._read = self._read[0], None
        return [layer.tolist() for layer in counts]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block."""
        before = _load.set(self)
        try:
            yield
        finally:
            _load.reset(before)


# Of each thread, so that several engines of one process count their own tokens.
_layers: ContextVar[dict[int, LayerLoad] | None] = ContextVar("layers", default=None)
_load: ContextVar[ExpertLoad | None] = ContextVar("load", default=None)


def count_call(ids_TK: torch.Tensor, down: torch.Tensor) -> None:
    """Count one call of `cas::experts`, if counting is on. down: the layer's weight [X, …]."""
    if is_compiling_ahead():  # the ids are uninitialized
        return
    if (load := _load.get()) is not None:
        load.add(ids_TK, down)
    if (layers := _layers.get()) is None:
        return
    address = down.data_ptr()
    if address not in layers:
        layers[address] = LayerLoad(torch.zeros(down.shape[0], dtype=torch.int64, device=ids_TK.device))
    layers[address].add(ids_TK)


@contextmanager
def counting_no_experts() -> Iterator[None]:
    """Count nothing inside the block: for calls of another model."""
    load, layers = _load.set(None), _layers.set(None)
    try:
        yield
    finally:
        _load.reset(load)
        _layers.reset(layers)


@contextmanager
def counting_experts() -> Iterator[dict[int, LayerLoad]]:
    """Count inside the block. → the layers' loads, in the order in which the layers first ran"""
    loads: dict[int, LayerLoad] = {}
    before = _layers.set(loads)
    try:
        yield loads
    finally:
        _layers.reset(before)

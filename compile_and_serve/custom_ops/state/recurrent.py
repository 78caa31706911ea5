"""State of a fixed size for each sequence, which every token changes.

A slot, the state of one sequence, is a list of pages of the memory pool. A tensor of a layer is (H, *unit) for one sequence: H units, such
as heads, each of which lies in one page. Small tensors share a page.

Shape legend: S sequences, N pages, M pages of a slot, U units of a tensor in a page, H units of a tensor, n pages of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from compile_and_serve.custom_ops.state.kind import (
    AttentionFeature,
    ExampleTokens,
    GroupLayout,
    LayerState,
    PlacedTensor,
    StateKind,
    StateTensor,
)
from compile_and_serve.custom_ops.state.metadata import StepLengths

ALIGNMENT = 16  # bytes: of a tensor in its page


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayer(LayerState):
    """What one layer keeps of a sequence. parts: its tensors, (H, *unit) each. Every rank keeps them whole."""

    parts: tuple[StateTensor, ...]

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return self.parts


@dataclass(kw_only=True, slots=True)
class SlotMetadata(StepLengths):
    """A step as the ops of a recurrent group see it.

    read_pages, write_pages: int32 [S, M], the pages of each sequence's slot. A step reads the state as it was after `num_computed` tokens
    from `read_pages`, or begins from zeros where that is not above 0, and writes the state after all `seq_lens` tokens to `write_pages`.
    Mostly both are the same pages. If not, those that are read must stay as they are. Sequences of length 0 are padding, whose pages nobody
    else reads.
    """

    read_pages: torch.Tensor
    write_pages: torch.Tensor

    @property
    def num_computed(self) -> torch.Tensor:
        """int32 [S]: tokens of each sequence before this step."""
        return self.seq_lens - self.query_start_loc.diff()

    def new_output(self, like: torch.Tensor, *, may_be_captured: bool = False) -> torch.Tensor:
        """A contiguous tensor in the shape and dtype of `like` [T, …], for kernels that write every token of the step. Padding is 0.

        may_be_captured: a CUDA graph may hold the step, whose replays have more padding or less: all of it is 0.
        """
        if may_be_captured:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.clear_padding(out)
        return out

    def clear_padding(self, out: torch.Tensor) -> None:
        """Make the rows of padding 0. out: [T, …]."""
        if len(out) > self.num_tokens:
            out[self.num_tokens :].zero_()

    @property
    def cpu_arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The last arguments of every C++ kernel of these ops."""
        return self.query_start_loc, self.seq_lens, self.read_pages, self.write_pages, self.num_seqs


def gather_slot(state: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor, num_units: int) -> torch.Tensor:
    """The units of each sequence: [S, H, *unit].

    state: [N, U, *unit]. columns: int32 [n], which pages of a slot hold the tensor. pages: int32 [S, M]. num_units: H ≤ n · U.
    """
    pages_SH, places_H = _places(state, columns, pages, num_units)
    return state[pages_SH, places_H]


def scatter_slot(values: torch.Tensor, state: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
    """Write the units of each sequence. values: [S, H, *unit], in any dtype. The others are as in `gather_slot`."""
    pages_SH, places_H = _places(state, columns, pages, values.shape[1])
    state[pages_SH, places_H] = values.to(state.dtype)


def _places(state: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor, num_units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [S, H] and [H]: the page of each unit, and its place in that."""
    units_H = torch.arange(num_units, device=state.device)
    in_page = state.shape[1]
    return pages[:, columns[units_H // in_page].long()].long(), units_H % in_page


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """Each sequence has a slot of `GroupLayout.pages_per_slot` pages.

    The model's argument for a tensor is the pair (state [N, U, *unit], columns int32 [n]), which `gather_slot` explains.

    dtype: of tensors that say none. snapshots: other sequences may take up a state that was kept. rollback_tokens: the state after n tokens
    can be taken up at any m ≥ n - rollback_tokens, by an op that is told m (`SlotMetadata.num_computed`).
    """

    unit: ClassVar[Literal["slot"]] = "slot"
    window: ClassVar[int | None] = None
    features: ClassVar[frozenset[AttentionFeature]] = frozenset()

    dtype: torch.dtype = torch.float32
    snapshots: bool = False
    rollback_tokens: int = 0

    @property
    def is_shareable(self) -> bool:
        return self.snapshots

    def dtype_of(self, tensor: StateTensor, cache_dtype: torch.dtype) -> torch.dtype:
        return tensor.dtype or self.dtype

    def with_state_dtype(self, dtype: torch.dtype) -> Recurrent:
        return replace(self, dtype=dtype)

    def can_roll_back(self, num_tokens: int) -> bool:
        return num_tokens <= self.rollback_tokens

    def covers(self, other: StateKind) -> bool:
        """It keeps no tokens."""
        return False

    def layout(self, tensors: Mapping[str, StateTensor], tokens_per_page: int, page_bytes: int | None = None) -> GroupLayout:
        """As many units of a tensor as fit in a page; small tensors behind others. page_bytes: None: each tensor is an allocation of its
        own with one unit in a page, so that all use the first columns.
        """
        placed: dict[str, PlacedTensor] = {}
        columns: dict[str, tuple[int, ...]] = {}
        used: list[int] = []  # bytes of each page of the slot
        for name, tensor in tensors.items():
            num_units, unit = tensor.shape[0], tensor.shape[1:]
            assert tensor.dtype is not None
            unit_bytes = math.prod(unit) * tensor.dtype.itemsize
            if page_bytes is None:
                placed[name], columns[name] = PlacedTensor(shape=(1, *unit), dtype=tensor.dtype, offset=0), tuple(range(num_units))
                continue
            in_page = min(num_units, page_bytes // unit_bytes)
            assert in_page, f"a unit of {name} takes {unit_bytes} bytes, a page has {page_bytes}"
            column = len(used)
            if in_page == num_units:  # behind others, where there is room
                column = next((c for c, begin in enumerate(used) if begin + num_units * unit_bytes <= page_bytes), column)
            used += [0] * (column == len(used))
            placed[name] = PlacedTensor(shape=(in_page, *unit), dtype=tensor.dtype, offset=used[column])
            columns[name] = tuple(range(column, column + -(-num_units // in_page)))
            for number, one in enumerate(columns[name]):
                used += [0] * (one == len(used))
                used[one] = _aligned(used[one] + min(in_page, num_units - number * in_page) * unit_bytes)
        least_bytes = max((_aligned(math.prod(one.shape[1:]) * one.dtype.itemsize) for one in placed.values()), default=0)
        num_columns = max((column + 1 for one in columns.values() for column in one), default=0)
        return GroupLayout(tensors=placed, page_bytes=page_bytes or least_bytes, columns=columns, pages_per_slot=num_columns)

    def pages_of_request(self, layout: GroupLayout, max_model_len: int, max_step_tokens: int) -> int:
        """Of its state, and of a snapshot from which it moves on."""
        return layout.pages_per_slot * (2 if self.snapshots else 1)

    def bytes_read(self, name: str, layout: GroupLayout, num_tokens: int) -> int:
        """All of it, whatever the number of tokens."""
        return layout.tensors[name].num_bytes * len(layout.columns[name])

    def metadata(self, lengths: StepLengths, pages: tuple[torch.Tensor, ...], backend: Any) -> SlotMetadata:
        """pages: those that are read and those that are written."""
        read_pages, write_pages = pages
        given = {one.name: getattr(lengths, one.name) for one in fields(StepLengths)}
        return SlotMetadata(read_pages=read_pages, write_pages=write_pages, **given)

    def example_pages(
        self, tokens: ExampleTokens, num_pages: int, layout: GroupLayout, num_columns: int | None, *, writes: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The pages that are read and those that are written, int32 [S, M]: the same. The last page is that of padding."""
        shape = num_seqs, columns = len(tokens.seq_lens), num_columns or layout.pages_per_slot
        if not writes:
            table = np.full(shape, num_pages - 1, dtype=np.int32)
        else:
            assert num_seqs * columns < num_pages, f"the slots of {num_seqs} sequences need more than {num_pages} pages"
            table = np.arange(num_seqs * columns, dtype=np.int32).reshape(shape)
        return table, table


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

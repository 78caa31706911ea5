"""State of a fixed size for each sequence, which every token changes.

Shape legend: S sequences, R batch slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentLayer(LayerState):
    """Tensors of fixed shapes, one of each for every running sequence. Every rank keeps it whole."""

    shapes: tuple[tuple[int, ...], ...]

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return tuple([StateTensor(shape=shape) for shape in self.shapes])


@dataclass(kw_only=True, slots=True)
class SlotMetadata(StepLengths):
    """A step as the ops of a recurrent group see it.

    slots: int64 [S], row of the state of each sequence (the last row for padding). A sequence whose seq_len is its number of new tokens
    begins from zeros.
    """

    slots: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrent:
    """Each sequence has a row of [R + 1, …] tensors: one for each batch slot and one for padding. dtype: of tensors that say none."""

    unit: ClassVar[Literal["slot"]] = "slot"
    window: ClassVar[int | None] = None
    is_shareable: ClassVar[bool] = False
    features: ClassVar[frozenset[AttentionFeature]] = frozenset()

    dtype: torch.dtype = torch.float32

    def dtype_of(self, tensor: StateTensor, cache_dtype: torch.dtype) -> torch.dtype:
        return tensor.dtype or self.dtype

    def can_roll_back(self, num_tokens: int) -> bool:
        return num_tokens == 0

    def covers(self, other: StateKind) -> bool:
        """It keeps no tokens."""
        return False

    def layout(self, tensors: Mapping[str, StateTensor], tokens_per_page: int, page_bytes: int | None = None) -> GroupLayout:
        placed: dict[str, PlacedTensor] = {}
        for name, tensor in tensors.items():
            assert tensor.dtype is not None
            placed[name] = PlacedTensor(shape=tensor.shape, dtype=tensor.dtype, offset=0)
        return GroupLayout(tensors=placed, page_bytes=0)

    def pages_of_request(self, layout: GroupLayout, max_model_len: int, max_step_tokens: int) -> int:
        return 0

    def bytes_read(self, tensor: PlacedTensor, layout: GroupLayout, num_tokens: int) -> int:
        return tensor.num_bytes

    def metadata(self, lengths: StepLengths, pages: tuple[torch.Tensor, ...], backend: Any) -> SlotMetadata:
        """pages: the slots."""
        return SlotMetadata(slots=pages[0], **{one.name: getattr(lengths, one.name) for one in fields(StepLengths)})

    def example_pages(
        self, tokens: ExampleTokens, num_pages: int, layout: GroupLayout, num_columns: int | None, *, writes: bool
    ) -> tuple[np.ndarray, ...]:
        num_seqs = len(tokens.seq_lens)
        return (np.arange(num_seqs) if writes else np.full(num_seqs, num_pages - 1),)

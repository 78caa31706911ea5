"""Rows that another model, an encoder, computes for tokens of prompts.

They lie in a region of their own, not in pages of the pool: a row of an encoder is not for a number of tokens of one sequence, and many
sequences read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from compile_and_serve.custom_ops.state.kind import (
    AttentionFeature,
    BesideTokens,
    ExampleTokens,
    GroupLayout,
    LayerState,
    StateTensor,
    one_behind_the_other,
)
from compile_and_serve.custom_ops.state.metadata import StepLengths


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRow(LayerState):
    """Rows of `width` numbers. Every rank keeps them whole."""

    width: int
    dtype: torch.dtype

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (StateTensor(shape=(self.width,), dtype=self.dtype),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows(BesideTokens):
    """The model's argument for a tensor is [R, width]. An input says which row each token reads (`ENCODER_ROW`, `read_rows`)."""

    unit: ClassVar[Literal["rows"]] = "rows"
    features: ClassVar[frozenset[AttentionFeature]] = frozenset()

    def layout(self, tensors: Mapping[str, StateTensor], tokens_per_page: int, page_bytes: int | None = None) -> GroupLayout:
        """A "page" is one row of each tensor."""
        return one_behind_the_other(tensors)

    def pages_of_request(self, layout: GroupLayout, max_model_len: int, max_step_tokens: int) -> int:
        """None of the pool."""
        return 0

    def bytes_read(self, name: str, layout: GroupLayout, num_tokens: int) -> int:
        """Decodes read none."""
        return 0

    def metadata(self, lengths: StepLengths, pages: tuple[torch.Tensor, ...], backend: Any) -> StepLengths:
        return lengths

    def example_pages(
        self, tokens: ExampleTokens, num_pages: int, layout: GroupLayout, num_columns: int | None, *, writes: bool
    ) -> tuple[()]:
        return ()


ENCODER_ROWS = Rows()

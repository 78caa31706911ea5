"""Keys and values of an encoder's output, which the layers of a decoder read beside those of its own tokens (cross-attention).

They are written once, when a request begins, and only read after that. Requests whose items have equal contents share them. They lie in
pages of the memory pool, as those of tokens do, but belong to items beside the prompt: a sequence of tokens may grow, its items do not.

Shape legend: S sequences, T tokens of the step, N pages, P rows per page, M block-table columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from compile_and_serve.custom_ops.state.kind import (
    AttentionFeature,
    BesideTokens,
    ExampleTokens,
    GroupLayout,
    StateTensor,
    one_behind_the_other,
)
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata, StepLengths

CROSS_CACHES = "cross_caches"  # the name of the group, and the model's argument: one [N, 2, K, P, E] a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttention(BesideTokens):
    """Layers keep what `KVCacheSpec` says for each row of the items of a request. An input says how many rows each token reads
    (`CROSS_ROWS`).

    max_rows: of all items of a request. is_required: a request without items cannot run.
    """

    max_rows: int
    is_required: bool = True
    unit: ClassVar[Literal["items"]] = "items"
    features: ClassVar[frozenset[AttentionFeature]] = frozenset(("cross",))

    def layout(self, tensors: Mapping[str, StateTensor], tokens_per_page: int, page_bytes: int | None = None) -> GroupLayout:
        """As of tokens, but the pages hold rows."""
        placed = one_behind_the_other(tensors)
        return GroupLayout(tensors=placed.tensors, page_bytes=placed.page_bytes, rows_per_page=tokens_per_page)

    def pages_of_request(self, layout: GroupLayout, max_model_len: int, max_step_tokens: int) -> int:
        """Of its items."""
        return self.max_pages(layout)

    def max_pages(self, layout: GroupLayout) -> int:
        """M: pages of the items of a request."""
        return -(-self.max_rows // layout.rows_per_page)

    def bytes_read(self, name: str, layout: GroupLayout, num_tokens: int) -> int:
        """All rows, whatever the number of tokens."""
        return self.max_rows * layout.tensors[name].num_bytes // layout.rows_per_page

    def metadata(self, lengths: StepLengths, pages: tuple[torch.Tensor, ...], backend: Any) -> AttentionMetadata:
        """pages: the block table int32 [S, M]. Nothing is written for the step's tokens."""
        (block_table,) = pages
        given = {one.name: getattr(lengths, one.name) for one in fields(StepLengths)}
        return AttentionMetadata(backend=backend, block_table=block_table, slot_mapping=lengths.query_start_loc[:0].long(), **given)

    def example_pages(
        self, tokens: ExampleTokens, num_pages: int, layout: GroupLayout, num_columns: int | None, *, writes: bool
    ) -> tuple[np.ndarray]:
        """Block table int32 [S, M] of sequences without items, whose tokens read no row."""
        return (np.zeros((len(tokens.seq_lens), num_columns or self.max_pages(layout)), dtype=np.int32),)

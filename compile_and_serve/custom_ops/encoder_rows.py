"""How a model reads the rows that an encoder computed: an input says which row each token reads, an op reads them.

Shape legend: T tokens of the step, R rows, D width of a row.

Row 0 is always zero, and stands for "none": so padding and synthetic steps read it, and a step whose tokens all read row 0 is one without
the (optional) input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch

ROWS_PER_PAGE = 16  # rows are handed out in pages of so many
_NAME = "encoder_row"


def _fill(batch: TokenBatch) -> np.ndarray | None:
    pieces = list(batch.rows_of(_NAME))
    if not pieces:
        return None
    rows_T = np.zeros(len(batch.token_ids), dtype=np.int64)
    for tokens, rows in pieces:
        rows_T[tokens] = rows
    return rows_T


ENCODER_ROW = StepInput(name=_NAME, dtype=torch.int64, dims=(TOKENS,), fill=_fill, advance="same", optional=True)


def row_numbers(page_ids: Sequence[int], length: int) -> np.ndarray:
    """int64 [length]: the rows of an item of so many, which lie in these pages."""
    begins = 1 + np.array(page_ids, dtype=np.int64) * ROWS_PER_PAGE
    return (begins[:, None] + np.arange(ROWS_PER_PAGE)).reshape(-1)[:length]


def num_rows_of(num_pages: int) -> int:
    """R of a region of so many pages, with row 0."""
    return 1 + num_pages * ROWS_PER_PAGE


# A split point, so that no piece is compiled for one number of rows.
read_rows = define(
    "read_rows(Tensor rows, Tensor encoder_row) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda rows, encoder_row: rows.new_empty((encoder_row.shape[0], rows.shape[1])),
    CompositeExplicitAutograd=lambda rows, encoder_row: rows.index_select(0, encoder_row),
)

"""What a step tells the ops of its state groups.

Shape legend: T tokens of the step, S sequences, P tokens per page, M block-table columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(kw_only=True, slots=True)
class StepLengths:
    """The sequences of a step, which all of its state groups share. Tensors are on the model's device; integers are on the host.

    Sequences are contiguous in the token dimension: sequence s has tokens query_start_loc[s] … query_start_loc[s+1]-1, which are the
    last of its seq_lens[s] tokens. A batch may mix decodes and prefill chunks. Without sequences, keys and values are only written.
    """

    query_start_loc: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S], tokens in the cache, those of this step included
    num_seqs: int
    num_tokens: int  # without padding; T may be larger. Outputs of padding are unspecified but finite
    max_query_len: int
    max_seq_len: int
    # False: a query token reads all tokens of its sequence in the cache, also those behind it. Mostly a sequence has one then
    # (`AttentionBackend.masks_nothing`).
    is_causal: bool = True
    # Host copies for backends that plan on the host. Without them, such a backend waits for the device.
    query_start_loc_cpu: np.ndarray | None = None  # int32 [S + 1]
    seq_lens_cpu: np.ndarray | None = None  # int32 [S]
    # Of an input that says where segments end (`StepInput.ends_segments`). None: as many as tokens at most.
    num_segments: int | None = None


@dataclass(kw_only=True, slots=True)
class AttentionMetadata(StepLengths):
    """A step as the attention ops of one state group see it."""

    backend: Any  # an `AttentionBackend`; None where the group's ops need none
    block_table: torch.Tensor  # int32 [S, M], column c holds the block of tokens c*P … (c+1)*P-1
    slot_mapping: torch.Tensor  # int64 [T], block * P + offset; -1: padding, not written
    window: int | None = None  # a token reads the last `window` tokens, itself included; None: all
    chunked: bool = False  # a token reads only its own chunk of `window` tokens; chunks start at multiples of `window`
    # For a captured step in which all sequences have the same small number of tokens: they describe each token as a sequence that ends
    # with it. The graph itself fills them, so it does not depend on their addresses (compare=False).
    row_starts: torch.Tensor | None = field(default=None, compare=False)  # int32 [T + 1]
    row_seq_lens: torch.Tensor | None = field(default=None, compare=False)  # int32 [T]
    row_block_table: torch.Tensor | None = field(default=None, compare=False)  # int32 [T, M]

    def host_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The sequences' `query_start_loc` and `seq_lens` on the host: copied from the device if the `…_cpu` fields are not set."""
        starts, seq_lens = self.query_start_loc_cpu, self.seq_lens_cpu
        if starts is None or seq_lens is None:
            starts, seq_lens = self.query_start_loc.cpu().numpy(), self.seq_lens.cpu().numpy()
        return starts[: self.num_seqs + 1], seq_lens[: self.num_seqs]

    def add_rows(self, query_len: int) -> None:
        """Allocate the `row_…` tensors, for sequences of `query_len` tokens each. They describe padding until `fill_rows`."""
        num_tokens, device = query_len * self.seq_lens.shape[0], self.seq_lens.device
        self.row_starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        self.row_seq_lens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.row_block_table = torch.zeros(num_tokens, self.block_table.shape[1], dtype=torch.int32, device=device)

    def fill_rows(self, query_len: int) -> None:
        """Set the `row_…` tensors from the sequences' lengths and blocks, on the device. Rows of a sequence of length 0 have length 0."""
        assert self.row_seq_lens is not None
        assert self.row_block_table is not None
        lens_S1 = self.seq_lens[:, None]
        ends_Sq = lens_S1 - torch.arange(query_len - 1, -1, -1, device=lens_S1.device)
        self.row_seq_lens.copy_(torch.where(lens_S1 > 0, ends_Sq, 0).flatten())
        columns = self.block_table.shape[1]
        self.row_block_table.view(-1, query_len, columns).copy_(self.block_table[:, None].expand(-1, query_len, -1))

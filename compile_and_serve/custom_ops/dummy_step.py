"""Synthetic steps, which warm up, capture, verify, measure and demonstrate a model.

Shape legend: T tokens of the step, S sequences, P tokens per page, M block-table columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.attention import StepLengths
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.step import StateGroup, Step, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_builder import build_step


def make_step(
    inputs: Sequence[StepInput],
    groups: Sequence[StateGroup],
    sequences: Sequence[tuple[int, int]],
    *,
    state: Mapping[str, torch.Tensor],
    tokens_per_page: Mapping[str, int],
    backends: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    token_ids: np.ndarray | None = None,
    row_indices: np.ndarray | None = None,
    writes_state: bool = True,
    num_columns: Mapping[str, int] | None = None,
) -> Step:
    """A step over sequences of (cached tokens, new tokens), planned by its backends.

    state: the groups' tensors by name. tokens_per_page: by the name of the paged group. backends: by the name of the attention group;
    None: the reference everywhere. token_ids: int64 [T], None: zeros. row_indices: int64 [L], None: the last token of each sequence.
    writes_state: if False, tokens are not written to paged state, and sequences use the padding slot. num_columns: of the block tables,
    by the name of the paged group; None: as few as the sequences need.
    """
    device = device or torch.device("cpu")
    cached, new = (np.array(column, dtype=np.int64) for column in zip(*sequences, strict=True))
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    seq_lens = (cached + new).astype(np.int32)
    num_tokens, num_seqs = int(starts[-1]), len(sequences)
    batch = TokenBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int64) if token_ids is None else token_ids,
        positions=np.concatenate([np.arange(c, c + n) for c, n in zip(cached, new, strict=True)]),
        query_start_loc=starts,
        row_indices=starts[1:].astype(np.int64) - 1 if row_indices is None else row_indices,
        request_ids=[str(number) for number in range(num_seqs)],
    )

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    lengths = StepLengths(
        query_start_loc=upload(starts),
        seq_lens=upload(seq_lens),
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_query_len=int(new.max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
    )
    pages, slots = {}, {}
    for group in groups:
        if group.paged:
            columns = (num_columns or {}).get(group.name)
            table_SM, slots_T = _pages(group, batch, seq_lens, state, tokens_per_page[group.name], writes_state, columns)
            pages[group.name] = upload(table_SM), upload(slots_T)
        else:
            slots[group.name] = _slots(group, state, num_seqs, writes_state).to(device)
    chosen = {name: (backends or {}).get(name) or TorchAttention() for name in pages}
    return build_step(
        groups,
        lengths,
        pages=pages,
        backends=chosen,
        slots=slots,
        plans=True,
        inputs={one.name: _input(one, batch).to(device) for one in inputs},
        state=state,
        num_rows=len(batch.row_indices),
    )


def _input(one: StepInput, batch: TokenBatch) -> torch.Tensor:
    """The values of an input. One of the device has random numbers, the same at every call; integers are 0."""
    if one.source == "host":
        return torch.from_numpy(np.ascontiguousarray(one.values(batch))).to(one.dtype)
    shape = one.shape(len(batch.token_ids), len(batch.row_indices))
    if not one.dtype.is_floating_point:
        return torch.zeros(shape, dtype=one.dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(one.name.encode()))).to(one.dtype)


def _pages(
    group: StateGroup,
    batch: TokenBatch,
    seq_lens: np.ndarray,
    state: Mapping[str, torch.Tensor],
    size: int,
    writes: bool,
    num_columns: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Block table int32 [S, M] and slot mapping int64 [T]: each sequence has its own share of the pages, in order."""
    num_seqs = len(seq_lens)
    columns = -(-int(seq_lens.max()) // size)
    if not writes:
        return np.zeros((num_seqs, num_columns or columns), dtype=np.int32), np.full(len(batch.positions), -1, dtype=np.int64)
    num_pages = state[next(iter(group.tensor_shapes(size)))].shape[0]
    share = num_pages // num_seqs
    assert share >= columns, f"{num_seqs} sequences of up to {seq_lens.max()} tokens need more than {num_pages} pages"
    table = (np.arange(num_seqs)[:, None] * share + np.arange(columns)).astype(np.int32)
    pages = table[batch.sequence_of_token, batch.positions // size].astype(np.int64)
    return table, pages * size + batch.positions % size


def _slots(group: StateGroup, state: Mapping[str, torch.Tensor], num_seqs: int, writes: bool) -> torch.Tensor:
    """int64 [S]: a row of the state for each sequence, or the padding's for all."""
    num_rows = next(iter(state[name].shape[0] for name in group.tensor_shapes(1)))
    return torch.arange(num_seqs) if writes else torch.full((num_seqs,), num_rows - 1)

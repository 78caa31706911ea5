"""Synthetic steps, which warm up, capture, verify, measure and demonstrate a model.

Shape legend: T tokens of the step, L rows of output.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import ExampleTokens
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import Step, StepInput, TokenBatch
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

    state: the groups' tensors by name. tokens_per_page: by the name of the group whose pages hold tokens. backends: by the name of the
    attention group; None: the reference everywhere. token_ids: int64 [T], None: zeros. row_indices: int64 [L], None: the last token of each
    sequence. writes_state: if False, the step changes no state. num_columns: of the block tables, by the name of the group; None: as few as
    the sequences need.
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
    tokens = ExampleTokens(positions_T=batch.positions, sequence_T=batch.sequence_of_token, seq_lens=seq_lens)
    pages: dict[str, tuple[torch.Tensor, ...]] = {}
    for group in groups:
        layout = group.layout(tokens_per_page.get(group.name, 1), torch.float32)
        # A stage may hold none of the group's layers; then it has the same pages for others.
        held = next((state[name] for name in group.tensor_names if name in state), None)
        num_pages = (next(iter(state.values())) if held is None else held).shape[0]
        columns = (num_columns or {}).get(group.name)
        arrays = group.kind.example_pages(tokens, num_pages, layout, columns, writes=writes_state)
        pages[group.name] = tuple([upload(array) for array in arrays])
    return build_step(
        groups,
        lengths,
        pages=pages,
        backends={name: (backends or {}).get(name) or TorchAttention() for name in pages},
        plans=True,
        inputs={one.name: _input(one, batch).to(device) for one in inputs},
        state=state,
        num_rows=len(batch.row_indices),
    )


def _input(one: StepInput, batch: TokenBatch) -> torch.Tensor:
    """The values of an input. Where the host has none, they are random numbers, the same at every call; integers are 0."""
    values = one.values(batch) if one.source == "host" else None
    if values is not None:
        return torch.from_numpy(np.ascontiguousarray(values)).to(one.dtype)
    shape = one.shape(len(batch.token_ids), len(batch.row_indices))
    if not one.dtype.is_floating_point:
        return torch.zeros(shape, dtype=one.dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(one.name.encode()))).to(one.dtype)

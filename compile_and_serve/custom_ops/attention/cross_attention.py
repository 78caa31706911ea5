"""`cas::cross_attention`: attention of a decoder's tokens to an encoder's rows, whose keys and values were written before; a split point.

The kernels of paged attention compute it, without a mask. Where they take only one query of a sequence so, each token is a sequence of
its own, as in decodes. Nothing is written.

Shape legend: T tokens of the step, S sequences, H query heads, K key/value heads, E head size, N pages, P rows per page, M block-table
columns.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.state.cross import CROSS_CACHES
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch, current_metadata
from compile_and_serve.custom_ops.step_data import CROSS_ROWS_DATUM, CROSS_SPANS_ARRAY, ArrayInfo


def _num_rows(batch: TokenBatch) -> np.ndarray:
    return batch.data_of_token(CROSS_ROWS_DATUM, 0).astype(np.int32)


CROSS_ROWS = StepInput(name="cross_rows", dtype=torch.int32, dims=(TOKENS,), fill=_num_rows, advance="same")


def _spans(batch: TokenBatch) -> np.ndarray | None:
    nothing_2T = np.zeros((2, len(batch.token_ids)), dtype=np.int32)
    spans_2T = batch.with_rows_of(CROSS_SPANS_ARRAY, nothing_2T, axis=1, holds=True)
    return None if spans_2T is nothing_2T else spans_2T


# The first page of what a token reads, among those of its request, and how many rows: for models that read one of several items.
CROSS_SPANS = StepInput(
    name="cross_spans",
    dtype=torch.int32,
    dims=(2, TOKENS),
    fill=_spans,
    advance="same",
    optional=True,
    arrays=(ArrayInfo(name=CROSS_SPANS_ARRAY, row_shape=(2,)),),
)


def _cross_attention(
    q_THE: torch.Tensor,
    cache: torch.Tensor,
    rows_T: torch.Tensor,
    scale: float,
    group: str = CROSS_CACHES,
    first_pages_T: torch.Tensor | None = None,
) -> torch.Tensor:
    metadata: AttentionMetadata = current_metadata(group)
    num_tokens, device = q_THE.shape[0], q_THE.device
    table = metadata.block_table
    no_slots_T = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    nothing_TKE = q_THE[:, : cache.shape[2]]  # no slot: these are not written
    if metadata.backend.masks_nothing and first_pages_T is None:
        of_step = replace(
            metadata,
            slot_mapping=no_slots_T,
            seq_lens=rows_T[metadata.query_start_loc[:-1].long().clamp(max=num_tokens - 1)],
            max_seq_len=table.shape[1] * cache.shape[3],
            is_causal=False,
        )
        return metadata.backend.forward(q_THE, nothing_TKE, nothing_TKE, cache, scale, of_step)
    places_T1 = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    if metadata.max_query_len != 1 or table.shape[0] != num_tokens or first_pages_T is not None:
        # Tokens behind the last sequence are padding, which reads no row.
        sequence_T = torch.searchsorted(metadata.query_start_loc[1:], places_T1[:num_tokens], right=True)
        table = table[sequence_T.clamp(max=table.shape[0] - 1)]
    if first_pages_T is not None:
        columns_TM = torch.arange(table.shape[1], device=device) + first_pages_T[:, None]
        table = table.gather(1, columns_TM.clamp(max=table.shape[1] - 1))
    of_tokens = AttentionMetadata(
        backend=metadata.backend,
        block_table=table,
        slot_mapping=no_slots_T,
        query_start_loc=places_T1,
        seq_lens=rows_T.contiguous(),
        num_seqs=num_tokens,
        num_tokens=num_tokens,
        max_query_len=1,
        max_seq_len=table.shape[1] * cache.shape[3],
        is_causal=False,
    )
    return metadata.backend.forward(q_THE, nothing_TKE, nothing_TKE, cache, scale, of_tokens)


CROSS_ATTENTION = define(
    'cross_attention(Tensor q, Tensor cache, Tensor rows, float scale, str group="cross_caches", Tensor? first_pages=None) -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=2,
    fake=lambda q_THE, *_: torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device),
    sharding=Sharding(inputs={"q": 1}, output=1, state={"cache": (2, "q")}, must_shard=True),
    CompositeExplicitAutograd=_cross_attention,
)


def cross_attention(
    q_THE: torch.Tensor,
    cache: torch.Tensor,
    rows_T: torch.Tensor,
    scale: float,
    group: str = CROSS_CACHES,
    first_pages_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ) v over the rows of the items of each token's request; 0 for a token that reads none.

    q_THE: [T, H, E]; cache: [N, 2, K, P, E], not changed; rows_T: int32 [T], rows that each token reads (`CROSS_ROWS`); scale: usually
    E ** -0.5; group: the state group of the cache, of the kind `CrossAttention`; first_pages_T: int32 [T], the page of the request at which
    a token's rows begin (`CROSS_SPANS`), None: the first. With it, tokens of a sequence may read different rows; without it, they read the
    same. → [T, H, E] in q's dtype
    """
    return CROSS_ATTENTION(q_THE, cache, rows_T, scale, group, first_pages_T)

"""Makes a step and its metadata from a model's declarations. No other place makes them. New fields of `StepLengths` are passed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import torch

from compile_and_serve.custom_ops.attention.attention import AttentionBackend, AttentionMetadata, StepLengths
from compile_and_serve.custom_ops.step import SlotMetadata, StateGroup, Step


def build_step(
    groups: Sequence[StateGroup],
    lengths: StepLengths,
    *,
    pages: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    backends: Mapping[str, Any],
    inputs: dict[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    num_rows: int,
    slots: Mapping[str, torch.Tensor] | None = None,
    padded_tokens: int | None = None,
    uses_optional: bool = True,
    plans: bool = False,
) -> Step:
    """The step of these lengths, with the metadata of each group.

    pages: block table and slot mapping of each paged group. backends: of each attention group. slots: of each other group. inputs, state:
    by name. padded_tokens: None: no padding. plans: whether the backends plan the step now.
    """
    metadata: dict[str, Any] = {}
    for group in groups:
        if not group.paged:
            assert slots is not None
            metadata[group.name] = SlotMetadata(
                slots=slots[group.name],
                query_start_loc=lengths.query_start_loc,
                seq_lens=lengths.seq_lens,
                num_seqs=lengths.num_seqs,
                num_tokens=lengths.num_tokens,
                max_query_len=lengths.max_query_len,
            )
            continue
        block_table, slot_mapping = pages[group.name]
        backend = cast(AttentionBackend, backends.get(group.name))  # None where the group's ops need none
        metadata[group.name] = AttentionMetadata(
            backend=backend,
            block_table=block_table,
            slot_mapping=slot_mapping,
            window=group.window,
            chunked=group.chunked,
            **{one.name: getattr(lengths, one.name) for one in fields(lengths)},
        )
        if plans and group.is_attention:
            backend.plan(metadata[group.name])
    return Step(
        inputs=inputs,
        state=state,
        metadata=metadata,
        num_tokens=lengths.num_tokens,
        num_seqs=lengths.num_seqs,
        padded_tokens=lengths.num_tokens if padded_tokens is None else padded_tokens,
        padded_seqs=len(lengths.seq_lens),
        num_rows=num_rows,
        max_query_len=lengths.max_query_len,
        uses_optional=uses_optional,
    )

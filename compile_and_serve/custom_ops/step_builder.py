"""Makes a step and its metadata from a model's declarations. No other place makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, Step


def build_step(
    groups: Sequence[StateGroup],
    lengths: StepLengths,
    *,
    pages: Mapping[str, tuple[torch.Tensor, ...]],
    backends: Mapping[str, Any],
    inputs: dict[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    num_rows: int,
    padded_tokens: int | None = None,
    uses_optional: bool = True,
    plans: bool = False,
) -> Step:
    """The step of these lengths, with the metadata of each group; without groups, the lengths are all that ops see (`SEQUENCES`).

    pages: where each group's state lies, as its kind says (`StateKind.metadata`). backends: of each attention group. inputs, state: by
    name. padded_tokens: None: no padding. plans: whether the backends plan the step now.
    """
    metadata: dict[str, Any] = {} if groups else {SEQUENCES: lengths}
    for group in groups:
        backend = backends.get(group.name)  # None where the group's ops need none
        metadata[group.name] = group.kind.metadata(lengths, pages[group.name], backend)
        if plans and group.is_attention:
            cast(AttentionBackend, backend).plan(metadata[group.name])
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

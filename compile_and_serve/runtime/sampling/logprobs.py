"""Log-probabilities: of the chosen token of each row, of the likeliest tokens, and of tokens that a request names.

Shape legend: L rows with log-probabilities, V vocabulary, k alternatives per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.messages import TokenLogprobs

CHUNK_ROWS = 256  # rows in float32 at a time, to bound the memory of a long prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherLogprobs:
    """Of w tokens that each row names, padded with token 0."""

    ids_Lw: torch.Tensor  # int64
    logprobs_Lw: torch.Tensor  # float32
    ranks_Lw: torch.Tensor  # int64, 1-based

    def to_host(self) -> OtherLogprobs:
        """See `RowLogprobs.to_host`."""
        download = platform_of(self.ids_Lw.device).download
        return OtherLogprobs(ids_Lw=download(self.ids_Lw), logprobs_Lw=download(self.logprobs_Lw), ranks_Lw=download(self.ranks_Lw))

    def rows(self) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """ids, log-probabilities and ranks of each row. The tensors must be on the host."""
        return self.ids_Lw.tolist(), self.logprobs_Lw.tolist(), self.ranks_Lw.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLogprobs:
    """Log-probabilities of L rows, on the device; `to_host` copies them to the host."""

    tokens_L: torch.Tensor  # int64
    chosen_L: torch.Tensor  # float32, log-probability of the row's token
    ranks_L: torch.Tensor  # int64, 1-based
    top_ids_Lk: torch.Tensor  # int64
    top_Lk: torch.Tensor  # float32
    others: OtherLogprobs | None = None

    def to_host(self) -> RowLogprobs:
        """Copies, complete once the device reaches this point: see `Platform.download`."""
        download = platform_of(self.tokens_L.device).download
        return RowLogprobs(
            tokens_L=download(self.tokens_L),
            chosen_L=download(self.chosen_L),
            ranks_L=download(self.ranks_L),
            top_ids_Lk=download(self.top_ids_Lk),
            top_Lk=download(self.top_Lk),
            others=None if self.others is None else self.others.to_host(),
        )

    def to_messages(self, counts: list[int], num_others: Sequence[int] = ()) -> list[TokenLogprobs]:
        """One message per row: the chosen token, the `counts[i]` likeliest ones of row i, then its first `num_others[i]` others.

        The tensors must be on the host.
        """
        tokens, chosen, ranks = self.tokens_L.tolist(), self.chosen_L.tolist(), self.ranks_L.tolist()
        top_ids, top = self.top_ids_Lk.tolist(), self.top_Lk.tolist()
        messages = [
            TokenLogprobs(ids=[tokens[i], *top_ids[i][:count]], logprobs=[chosen[i], *top[i][:count]], rank=ranks[i])
            for i, count in enumerate(counts)
        ]
        if self.others is not None:
            ids, logprobs, other_ranks = self.others.rows()
            for i, (message, number) in enumerate(zip(messages, num_others, strict=True)):
                message.ids += ids[i][:number]
                message.logprobs += logprobs[i][:number]
                message.other_ranks = other_ranks[i][:number]
        return messages


def row_logprobs(
    logits_LV: torch.Tensor, tokens_L: torch.Tensor, count: int, others_Lw: torch.Tensor | None = None, *, normalized: bool = True
) -> RowLogprobs:
    """log softmax at `tokens_L`, at the `count` likeliest tokens and at `others_Lw`. A rank is 1 + the number of likelier tokens.

    logits_LV: any floating dtype; tokens_L, others_Lw: int64; 0 ≤ count ≤ V. normalized: False gives the logits themselves.
    """
    parts = []
    for start in range(0, logits_LV.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        others = None if others_Lw is None else others_Lw[rows]
        parts.append(_chunk_logprobs(logits_LV[rows].float(), tokens_L[rows], count, others, normalized))
    if len(parts) == 1:
        return parts[0]
    others_parts = [part.others for part in parts if part.others is not None]
    joined = None
    if others_parts:
        joined = OtherLogprobs(
            ids_Lw=torch.cat([part.ids_Lw for part in others_parts]),
            logprobs_Lw=torch.cat([part.logprobs_Lw for part in others_parts]),
            ranks_Lw=torch.cat([part.ranks_Lw for part in others_parts]),
        )
    return RowLogprobs(
        tokens_L=tokens_L,
        chosen_L=torch.cat([part.chosen_L for part in parts]),
        ranks_L=torch.cat([part.ranks_L for part in parts]),
        top_ids_Lk=torch.cat([part.top_ids_Lk for part in parts]),
        top_Lk=torch.cat([part.top_Lk for part in parts]),
        others=joined,
    )


def _chunk_logprobs(
    logits_LV: torch.Tensor, tokens_L: torch.Tensor, count: int, others_Lw: torch.Tensor | None, normalized: bool
) -> RowLogprobs:
    normalizer_L1 = logits_LV.logsumexp(dim=-1, keepdim=True) if normalized else logits_LV.new_zeros(1, 1)
    chosen_L1 = logits_LV.gather(1, tokens_L[:, None])
    top_Lk, top_ids_Lk = logits_LV.topk(count, dim=-1)
    others = None
    if others_Lw is not None:
        values_Lw = logits_LV.gather(1, others_Lw)
        ascending_LV = logits_LV.sort(dim=-1).values
        not_larger_Lw = torch.searchsorted(ascending_LV, values_Lw, right=True)
        others = OtherLogprobs(ids_Lw=others_Lw, logprobs_Lw=values_Lw - normalizer_L1, ranks_Lw=logits_LV.shape[1] - not_larger_Lw + 1)
    return RowLogprobs(
        tokens_L=tokens_L,
        chosen_L=(chosen_L1 - normalizer_L1).squeeze(1),
        ranks_L=(logits_LV > chosen_L1).sum(dim=-1) + 1,
        top_ids_Lk=top_ids_Lk,
        top_Lk=top_Lk - normalizer_L1,
        others=others,
    )

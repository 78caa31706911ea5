"""Log-probabilities of the model's own distribution: before temperature, penalties and filters.

Shape legend: L rows with log-probabilities, V vocabulary, k alternatives per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.messages import TokenLogprobs

CHUNK_ROWS = 256  # rows in float32 at a time, to bound the memory of a long prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLogprobs:
    """Log-probabilities of L rows, on the device; `to_host` copies them to the host."""

    tokens_L: torch.Tensor  # int64
    chosen_L: torch.Tensor  # float32, log-probability of the row's token
    ranks_L: torch.Tensor  # int64, 1-based
    top_ids_Lk: torch.Tensor  # int64
    top_Lk: torch.Tensor  # float32

    def to_host(self) -> RowLogprobs:
        """Copies, complete once the device reaches this point: see `Platform.download`."""
        download = platform_of(self.tokens_L.device).download
        return RowLogprobs(
            tokens_L=download(self.tokens_L),
            chosen_L=download(self.chosen_L),
            ranks_L=download(self.ranks_L),
            top_ids_Lk=download(self.top_ids_Lk),
            top_Lk=download(self.top_Lk),
        )

    def to_messages(self, counts: list[int]) -> list[TokenLogprobs]:
        """One message per row: the chosen token, then the `counts[i]` likeliest ones of row i.

        The tensors must be on the host.
        """
        tokens, chosen, ranks = self.tokens_L.tolist(), self.chosen_L.tolist(), self.ranks_L.tolist()
        top_ids, top = self.top_ids_Lk.tolist(), self.top_Lk.tolist()
        return [
            TokenLogprobs(ids=[tokens[i], *top_ids[i][:count]], logprobs=[chosen[i], *top[i][:count]], rank=ranks[i])
            for i, count in enumerate(counts)
        ]


def row_logprobs(logits_LV: torch.Tensor, tokens_L: torch.Tensor, count: int) -> RowLogprobs:
    """log softmax at `tokens_L` and at the `count` likeliest tokens. A rank is 1 + the number of likelier tokens.

    logits_LV: raw, any floating dtype; tokens_L: int64; 0 ≤ count ≤ V.
    """
    parts = [
        _chunk_logprobs(logits_LV[start : start + CHUNK_ROWS].float(), tokens_L[start : start + CHUNK_ROWS], count)
        for start in range(0, logits_LV.shape[0], CHUNK_ROWS)
    ]
    if len(parts) == 1:
        return parts[0]
    return RowLogprobs(
        tokens_L=tokens_L,
        chosen_L=torch.cat([part.chosen_L for part in parts]),
        ranks_L=torch.cat([part.ranks_L for part in parts]),
        top_ids_Lk=torch.cat([part.top_ids_Lk for part in parts]),
        top_Lk=torch.cat([part.top_Lk for part in parts]),
    )


def _chunk_logprobs(logits_LV: torch.Tensor, tokens_L: torch.Tensor, count: int) -> RowLogprobs:
    normalizer_L1 = logits_LV.logsumexp(dim=-1, keepdim=True)
    chosen_L1 = logits_LV.gather(1, tokens_L[:, None])
    top_Lk, top_ids_Lk = logits_LV.topk(count, dim=-1)
    return RowLogprobs(
        tokens_L=tokens_L,
        chosen_L=(chosen_L1 - normalizer_L1).squeeze(1),
        ranks_L=(logits_LV > chosen_L1).sum(dim=-1) + 1,
        top_ids_Lk=top_ids_Lk,
        top_Lk=top_Lk - normalizer_L1,
    )

"""Prompt look-up on the device (Saxena 2023): a draft is what followed the latest earlier occurrence of the sequence's last n tokens.

Shape legend: R batch slots, S sequences, W tokens that a slot has room for, K draft tokens of a sequence at most, T tokens to append.

`append_tokens` keeps the histories, `find_drafts` reads them. Neither waits for the device.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.platform import platform_of


def append_tokens(
    history_RW: torch.Tensor, slots_T: torch.Tensor, positions_T: torch.Tensor, tokens_T: torch.Tensor
) -> None:
    """history[slot, position] = token. Pairs of slot and position that are equal hold any of their tokens afterwards.

    history_RW: int32, contiguous. slots_T, positions_T, tokens_T: int64; positions are less than W.
    """
    history_RW.view(-1).index_copy_(0, slots_T * history_RW.shape[1] + positions_T, tokens_T.to(torch.int32))


def find_drafts(
    history_RW: torch.Tensor, slots_S: torch.Tensor, lengths_S: torch.Tensor, counts_S: torch.Tensor, num_drafts: int, shortest: int,
    longest: int,
) -> torch.Tensor:  # fmt: skip
    """What followed the longest match of the last `shortest` to `longest` tokens, the latest of equal ones. → int64 [S, K], K = num_drafts

    Behind the end of the history, a draft goes on with itself, as a repeating text does. -1 stands where a sequence has no match, and
    behind the first counts[s] tokens. history_RW: int32. slots_S, lengths_S, counts_S: int64; lengths are those of the histories, 0 for
    padding.
    """
    if platform_of(history_RW.device).runs_triton_kernels:
        from compile_and_serve.custom_ops.sampling.triton_ngram_drafts import find_matches

        matches_S = find_matches(history_RW, slots_S, lengths_S, shortest, longest)
    else:
        matches_S = _find_matches(history_RW, slots_S, lengths_S, shortest, longest)
    places_SK = torch.arange(num_drafts, device=slots_S.device).expand(len(slots_S), -1)
    period_S1 = (lengths_S - matches_S).clamp(min=1)[:, None]
    columns_SK = matches_S[:, None] + places_SK % period_S1
    tokens_SK = history_RW.view(-1)[slots_S[:, None] * history_RW.shape[1] + columns_SK].long()
    return torch.where((matches_S[:, None] > 0) & (places_SK < counts_S[:, None]), tokens_SK, -1)


def _find_matches(
    history_RW: torch.Tensor, slots_S: torch.Tensor, lengths_S: torch.Tensor, shortest: int, longest: int
) -> torch.Tensor:
    """int64 [S]: the position behind the best match; 0 where there is none."""
    tokens_SW = history_RW[slots_S]
    width = tokens_SW.shape[1]
    ends_W = torch.arange(width, device=slots_S.device)
    is_equal_SW = torch.ones_like(tokens_SW, dtype=torch.bool)
    match_len_SW = torch.zeros_like(tokens_SW, dtype=torch.int64)
    for n in range(1, longest + 1):
        last_S1 = tokens_SW.gather(1, (lengths_S - n).clamp(min=0)[:, None])
        before_SW = torch.nn.functional.pad(tokens_SW, (n, 0), value=-1)[:, :width]
        is_equal_SW = is_equal_SW & (before_SW == last_S1)
        match_len_SW += is_equal_SW
    is_match_SW = (match_len_SW >= shortest) & (ends_W < lengths_S[:, None])
    best_S = torch.where(is_match_SW, match_len_SW * width + ends_W, 0).amax(dim=1)
    return best_S % width

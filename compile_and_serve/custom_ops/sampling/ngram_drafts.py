"""Prompt look-up on the device (Saxena 2023): a draft is what followed the latest earlier occurrence of the sequence's last n tokens.

Shape legend: R batch slots, W tokens that a slot has room for, S sequences, K draft tokens of a sequence at most, T tokens of a step,
L of its rows that are sampled.

`append_tokens` keeps the histories, `find_drafts` reads them. Neither waits for the device.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.metadata import StepLengths


def append_tokens(
    history_RW: torch.Tensor,
    slots_L: torch.Tensor,
    sequences_L: torch.Tensor,
    rows_L: torch.Tensor,
    lengths: StepLengths,
    tokens_L: torch.Tensor,
) -> None:
    """history[slot, place + 1] = token: what was sampled at a step's rows. place: of the row's token in its sequence, by `lengths`. Equal
    places hold any of their tokens afterwards.

    history_RW: int32, contiguous. All others are int64; sequences: of each row, in the order of `lengths`. Places are less than W - 1.
    """
    if platform_of(history_RW.device).runs_triton_kernels:
        from compile_and_serve.custom_ops.sampling import triton_ngram_drafts

        triton_ngram_drafts.append_tokens(history_RW, slots_L, sequences_L, rows_L, lengths.query_start_loc, lengths.seq_lens, tokens_L)
        return
    places_L = rows_L + (lengths.seq_lens - lengths.query_start_loc[1:])[sequences_L]
    history_RW.view(-1).index_copy_(0, slots_L * history_RW.shape[1] + places_L + 1, tokens_L.to(torch.int32))


def find_drafts(
    history_RW: torch.Tensor,
    slots_S: torch.Tensor,
    lengths_S: torch.Tensor,
    counts_S: torch.Tensor,
    drafts_RK: torch.Tensor,
    shortest: int,
    longest: int,
    *,
    repeats: bool = False,
) -> None:
    """drafts[slot] = what followed the longest match of the last `shortest` to `longest` tokens, the latest of equal ones.

    Behind the end of the history, a draft goes on with itself, as a repeating text does. -1 stands where a sequence has no match, and
    behind the first counts[s] tokens. history_RW: int32, contiguous. slots_S, lengths_S, counts_S: int64; lengths are those of the
    histories, 0 for padding; counts are at most K. drafts_RK: int64, contiguous. repeats: where there is no match, the last token is
    repeated.
    """
    if platform_of(history_RW.device).runs_triton_kernels:
        from compile_and_serve.custom_ops.sampling import triton_ngram_drafts

        triton_ngram_drafts.find_drafts(history_RW, slots_S, lengths_S, counts_S, drafts_RK, shortest, longest, repeats=repeats)
        return
    matches_S = _find_matches(history_RW[slots_S], lengths_S, shortest, longest)
    if repeats:
        matches_S = torch.where((matches_S == 0) & (lengths_S > 0), lengths_S - 1, matches_S)
    places_K = torch.arange(drafts_RK.shape[1], device=slots_S.device)
    columns_SK = matches_S[:, None] + places_K % (lengths_S - matches_S).clamp(min=1)[:, None]
    is_draft_SK = (matches_S[:, None] > 0) & (places_K < counts_S[:, None])
    drafts_SK = torch.where(is_draft_SK, history_RW[slots_S[:, None], columns_SK].long(), -1)
    drafts_RK.index_copy_(0, slots_S, drafts_SK)


def _find_matches(tokens_SW: torch.Tensor, lengths_S: torch.Tensor, shortest: int, longest: int) -> torch.Tensor:
    """int64 [S]: the position behind the best match; 0 where there is none."""
    width = tokens_SW.shape[1]
    ends_W = torch.arange(width, device=tokens_SW.device)
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

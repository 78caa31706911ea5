"""Which draft tokens a step has accepted.

Every row of a step samples a token from the target's distribution at its position, with the random number of that position, as if there
were no drafts. Row i is meant for the position behind draft i - 1, so it counts only if the drafts before it were right. A draft is right
where the row before it sampled just that token.

This is rejection sampling (Leviathan et al., arXiv:2211.17192) for a drafter that is certain of its draft x: x is accepted with
probability min(1, p(x) / 1), and a rejected x is replaced by a token drawn from p without x. Both happen here in one draw. Moreover each
request gets the very tokens that it gets without speculation, since the random numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def chances_of(step: int, num_rows: int) -> np.ndarray:
    """float64 [num_rows] in [0, 1): what decides about the drafts of a step under synthetic acceptance, on all ranks alike."""
    return np.random.default_rng(step).random(num_rows)


def accepted_tokens(
    tokens_L: np.ndarray, counts: Sequence[int], drafts: Sequence[np.ndarray], chances_L: np.ndarray | None = None, rate: float = 0.0
) -> list[list[int]]:
    """Sequence → the tokens that it gains: its accepted drafts, and one token more.

    tokens_L: int64 [L], sampled at the rows. counts: rows of each sequence, at least one. drafts: for each sequence, the token that each of
    its rows but the last is compared with; -1 is never right. chances_L: in [0, 1); drafts are right where it is below `rate` instead.
    """
    accepted, first = [], 0
    for count, drafts_D in zip(counts, drafts, strict=True):
        tokens = tokens_L[first : first + count]
        if chances_L is None:
            is_wrong = tokens[:-1] != drafts_D
        else:
            is_wrong = (chances_L[first : first + count - 1] >= rate) | (drafts_D < 0)
            tokens = np.append(np.where(is_wrong, tokens[:-1], drafts_D), tokens[-1])
        wrong = np.flatnonzero(is_wrong)
        accepted.append(tokens[: wrong[0] + 1 if len(wrong) else count].tolist())
        first += count
    return accepted

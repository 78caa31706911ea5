"""Which of a test's many parametrized cases cover every pair of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations


def pairwise(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Positions of cases that together have every pair of values that any case has.

    cases: parameter → what identifies its value. Greedy: always the case with the most pairs that are still missing.
    """
    pairs = [set(combinations(sorted(case.items()), 2)) or set(case.items()) for case in cases]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen

"""Which of a test's many parametrized cases cover every value, every pair of values, or every three values."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import combinations


def covering_cases(cases: Sequence[Mapping[str, int]], size: int) -> set[int]:
    """Positions of cases that together have every combination of `size` values that any case has.

    cases: parameter → what identifies its value. Greedy: always the first case with the most combinations that are still missing.
    """
    combined = [set(combinations(sorted(case.items()), min(size, len(case)))) for case in cases]
    missing = set().union(*combined)
    chosen: set[int] = set()
    queue = [(-len(one), i) for i, one in enumerate(combined)]  # a case's number of missing combinations only falls
    heapq.heapify(queue)
    while missing:
        at_most, best = heapq.heappop(queue)
        count = len(combined[best] & missing)
        if count == -at_most:
            chosen.add(best)
            missing -= combined[best]
        elif count:
            heapq.heappush(queue, (-count, best))
    return chosen


def first_cases(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Positions of cases that have a value that no case before them has. cases: parameter → what identifies its value."""
    seen: set[tuple[str, int]] = set()
    chosen: set[int] = set()
    for i, case in enumerate(cases):
        if not case.items() <= seen:
            chosen.add(i)
            seen |= case.items()
    return chosen

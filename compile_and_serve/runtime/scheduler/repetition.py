"""Finds output that repeats itself without end."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.sampling_params import RepetitionDetectionParams


def repeats(token_ids: Sequence[int], begin: int, end: int, params: RepetitionDetectionParams) -> bool:
    """Whether token_ids[begin:end] ends with `min_count` copies of one pattern of the sizes that `params` allows."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        first = end - size * params.min_count
        if first < begin:
            return False
        # The copies are equal if the tokens equal those one pattern later. Two of them rule out almost every size.
        may_be = token_ids[end - 1 - size] == token_ids[end - 1] and token_ids[first] == token_ids[first + size]
        if may_be and token_ids[first : end - size] == token_ids[first + size : end]:
            return True
    return False

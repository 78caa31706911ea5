"""Ranges of token counts: one choice of a kernel holds for a whole range."""

from __future__ import annotations

import math

_WIDTHS = ((64, 1024), (128, 2048), (256, 4096), (2048, math.inf))  # (width of a range, token count up to which it applies)
_SMALLEST_RANGE = 16  # 2 to 16 tokens are one range: no tile has fewer rows


def token_range(num_tokens: int) -> int:
    """The last token count of num_tokens' range: 1, powers of two from 16 to 128, then multiples of `_WIDTHS`.

    Ranges are about as wide as a kernel's tile, because the number of tiles decides which kernel is fastest: the fastest kernel for 2048
    tokens took 1.8 times the time of the fastest for 1152, at 1152 tokens.
    """
    if num_tokens <= 1:
        return 1
    if num_tokens <= 128:
        return max(_SMALLEST_RANGE, 1 << (num_tokens - 1).bit_length())
    width = next(width for width, max_tokens in _WIDTHS if num_tokens <= max_tokens)
    return -(-num_tokens // width) * width


def token_ranges(max_tokens: int) -> list[int]:
    """The last token count of each range up to max_tokens, and max_tokens itself."""
    counts = [1]
    while counts[-1] < max_tokens:
        counts.append(min(token_range(counts[-1] + 1), max_tokens))
    return counts

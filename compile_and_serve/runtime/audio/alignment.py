"""When tokens of a transcript are said: cross-attention weights of chosen heads, aligned by dynamic time warping as in Whisper's own code.

Shape legend: A heads, T tokens, R rows of the encoder (20 ms each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import punctuation

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_MEDIAN_WIDTH = 7
_ATTACHED_TO_NEXT = "\"'“¡¿([{-"
_ATTACHED_TO_LAST = "\"'.。,，!！?？:：”)]}、"
_WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))


def token_rows(weights_TAR: np.ndarray) -> np.ndarray:
    """int64 [T]: the row at which the path of each token begins. weights_TAR: float32, softmax over rows."""
    weights_ATR = weights_TAR.transpose(1, 0, 2)
    deviation = weights_ATR.std(axis=1, keepdims=True)
    scaled_ATR = (weights_ATR - weights_ATR.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)
    likeness_TR = np.stack([_median(one_TR) for one_TR in scaled_ATR]).mean(axis=0, dtype=np.float32)
    return _warp(-likeness_TR.astype(np.float64))


def _median(values_TR: np.ndarray) -> np.ndarray:
    """Of `_MEDIAN_WIDTH` neighbors along the last dimension, which is mirrored at its ends."""
    half = _MEDIAN_WIDTH // 2
    if values_TR.shape[1] <= half:
        return values_TR
    windows = sliding_window_view(np.pad(values_TR, ((0, 0), (half, half)), mode="reflect"), _MEDIAN_WIDTH, axis=1)
    return np.partition(windows, half, axis=2)[..., half]


def _warp(cost_TR: np.ndarray) -> np.ndarray:
    """int64 [T]: the column at which the cheapest path from the first corner to the last one enters each row.

    Its steps are of one in either direction, or in both.

    Cells of an anti-diagonal are independent, so one is computed at a time: in the flat table its cells are `width - 1` apart.
    """
    num_tokens, num_rows = cost_TR.shape
    width = num_rows + 1
    total = np.full((num_tokens + 1) * width, np.inf, dtype=np.float32)
    steps = np.zeros((num_tokens + 1) * width, dtype=np.int8)
    total[0] = 0.0
    padded = np.zeros((num_tokens + 1, width))
    padded[1:, 1:] = cost_TR
    flat_cost = padded.ravel()
    for diagonal in range(2, num_tokens + num_rows + 1):
        first, last = max(1, diagonal - num_rows), min(num_tokens, diagonal - 1)
        begin, count = first * width + diagonal - first, last - first + 1
        end = begin + (count - 1) * (width - 1) + 1
        cells = slice(begin, end, width - 1)
        both, down, along = (total[begin - back : end - back : width - 1] for back in (width + 1, width, 1))
        is_both, is_down = (both < down) & (both < along), (down < both) & (down < along)
        steps[cells] = np.where(is_both, 0, np.where(is_down, 1, 2))
        total[cells] = flat_cost[cells] + np.where(is_both, both, np.where(is_down, down, along))
    table = steps.reshape(-1, width)
    table[0, :], table[:, 0] = 2, 1
    entered = np.zeros(num_tokens, dtype=np.int64)
    i, j = num_tokens, num_rows
    while i > 0 or j > 0:
        if i > 0:
            entered[i - 1] = max(j - 1, 0)
        step = table[i, j]
        i, j = i - (step != 2), j - (step != 1)
    return entered


def word_spans(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], language: str) -> list[tuple[str, int, int]]:
    """The words of text tokens, each as (text, first token, token behind the last one). decode: of tokens to text."""
    pieces: list[tuple[str, int, int]] = []
    begin = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        if "\ufffd" in text and end < len(tokens):
            continue  # a part of a character
        if not pieces or language in _WITHOUT_SPACES or text.startswith(" ") or text.strip() in punctuation:
            pieces.append((text, begin, end))
        else:
            before, first, _ = pieces[-1]
            pieces[-1] = (before + text, first, end)
        begin = end
    return _with_punctuation(pieces)


def _with_punctuation(pieces: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Marks that stand alone go with the word before or behind them, spaces with that behind them."""
    words: list[tuple[str, int, int]] = []
    is_open = False  # the last one waits for the next
    for text, begin, end in pieces:
        mark = text.strip()
        is_last = bool(words) and mark != "" and not text.startswith(" ") and all(one in _ATTACHED_TO_LAST for one in mark)
        if words and (is_open or is_last):
            before, first, _ = words[-1]
            words[-1] = (before + text, first, end)
        else:
            words.append((text, begin, end))
        is_open = text.startswith(" ") and all(one in _ATTACHED_TO_NEXT for one in mark)
    return words

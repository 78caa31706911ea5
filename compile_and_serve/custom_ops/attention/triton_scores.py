"""Scores of the attention kernels before the softmax, in base-2 logarithms, and the first key that a window leaves visible."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first token that the token at `position` (-1: padding) attends to. WINDOW: 0: no window."""
    if WINDOW == 0:
        first = position * 0
    elif CHUNKED:
        first = tl.maximum(position, 0) // WINDOW * WINDOW
    else:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit
def score_log2(products, distance, slopes, scale_log2, cap_log2, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """cap(scale · product) + slope · distance, times log2(e). slopes: times log2(e) already; distance: key - query."""
    scores = products * scale_log2
    if HAS_CAP:
        # cap · tanh(x / cap). An infinite power gives 1, and 0 gives -1.
        power = tl.exp2(scores * (2.0 * 1.4426950408889634 / cap_log2))
        scores = cap_log2 - 2.0 * cap_log2 / (power + 1.0)
    if HAS_ALIBI:
        scores += slopes * distance
    return scores


@triton.jit
def load_head_log2(pointer, heads_H, ok_H, IS_GIVEN: tl.constexpr):
    """One value for each head, times log2(e); zeros without a pointer."""
    values_H = tl.zeros(heads_H.shape, dtype=tl.float32)
    if IS_GIVEN:
        values_H = tl.load(pointer + heads_H, mask=ok_H, other=0.0).to(tl.float32) * 1.4426950408889634
    return values_H

"""Times of tokens and words: the paths of transformers' dynamic time warping, and words of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from compile_and_serve.runtime.audio.alignment import token_rows, word_spans


@pytest.mark.parametrize("shape", [(1, 2, 5), (7, 1, 40), (30, 3, 25), (12, 2, 3)])
def test_paths_are_those_of_transformers(shape: tuple[int, int, int]) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

    weights_TAR = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(3).softmax(dim=-1)
    one_ATR = weights_TAR.transpose(0, 1)
    if shape[0] > 1:  # there, one token has no deviation
        one_ATR = (one_ATR - one_ATR.mean(dim=1, keepdim=True)) / one_ATR.std(dim=1, keepdim=True, unbiased=False)
        one_ATR = _median_filter(one_ATR, 7)
    else:
        one_ATR = torch.zeros_like(one_ATR)
    tokens, rows = _dynamic_time_warping(-one_ATR.mean(dim=0).double().numpy())
    wanted = rows[np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)]
    np.testing.assert_array_equal(token_rows(weights_TAR.numpy()), wanted)


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("pieces", "language", "words"),
    [
        ([" Hel", "lo", ",", " wor", "ld", "."], "en", [" Hello,", " world."]),
        ([" (", "a", ")", " b", "-", "c"], "en", [" (a)", " b", "-c"]),
        (["Hi"], "en", ["Hi"]),
        (["你", "好", "。"], "zh", ["你", "好。"]),
        ([], "en", []),
    ],
)
def test_words(pieces: list[str], language: str, words: list[str]) -> None:
    """Spaces begin words, and marks go with the word before them. Parts of a character stay together."""
    tokens = list(range(len(pieces)))
    found = word_spans(tokens, lambda ids: "".join(pieces[one] for one in ids), language)
    assert [text for text, _, _ in found] == words
    assert [text for text, _, _ in word_spans(list("".join(pieces).encode()), decode, language)] == words
    assert [first for _, first, _ in found] + [len(tokens)] == [0, *(behind for _, _, behind in found)]

"""Prompt look-up on the device, in torch and in Triton's interpreter, compared with the drafter of token histories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.sampling import ngram_drafts
from compile_and_serve.custom_ops.sampling.ngram_drafts import append_tokens, find_drafts
from compile_and_serve.runtime.speculation.ngram import NgramDrafter

SLOTS = 9
Find = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def _kernel() -> Find:
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.sampling.triton_ngram_drafts import find_matches

    return find_matches


@pytest.fixture(params=["torch", "triton"])
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        monkeypatch.setattr(ngram_drafts, "_find_matches", _kernel())


@pytest.mark.usefixtures("_implementation")
@pytest.mark.parametrize("width", [40, 2500])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (3, 5)])
def test_drafts_are_those_of_token_histories(width: int, lengths: tuple[int, int]) -> None:
    rng = np.random.default_rng(width)
    vocab_size = 3 if width == 40 else 5  # few tokens, so that there are matches
    history_RW = torch.from_numpy(rng.integers(0, vocab_size, (SLOTS, width)).astype(np.int32))
    slots = rng.permutation(SLOTS)[:7]
    sizes = np.array([0, 1, 2, width // 2, width - 1, width - 2, 7])
    counts = np.array([6, 6, 6, 6, 6, 2, 1])
    given = (torch.from_numpy(array) for array in (slots, sizes, counts))
    drafts_SK = find_drafts(history_RW, *given, 6, *lengths)
    num_found = 0
    for slot, size, count, draft in zip(slots, sizes, counts, drafts_SK.tolist(), strict=True):
        tokens = history_RW[slot, :size].tolist()
        expected = NgramDrafter(*lengths).propose("r", tokens, int(count)) if size else []
        num_found += bool(expected)
        assert draft == expected + [-1] * (6 - len(expected)), (slot, size)
    assert num_found >= 3


def test_tokens_are_appended_to_their_histories() -> None:
    history_RW = torch.zeros(3, 8, dtype=torch.int32)
    slots_T, positions_T, tokens_T = torch.tensor([2, 0, 2]), torch.tensor([7, 1, 0]), torch.tensor([5, 6, 7])
    append_tokens(history_RW, slots_T, positions_T, tokens_T)
    expected = torch.zeros(3, 8, dtype=torch.int32)
    expected[2, 7], expected[0, 1], expected[2, 0] = 5, 6, 7
    assert torch.equal(history_RW, expected)

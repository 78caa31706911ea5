"""Prompt look-up on the device, in torch and in Triton's interpreter, compared with the drafter of token histories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.sampling.ngram_drafts import append_tokens, find_drafts
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.runtime.drafting.ngram import NgramDrafter

SLOTS, K = 9, 6


@pytest.fixture(params=["torch", "triton"], autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(CpuPlatform, "runs_triton_kernels", True)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("width", [40, 2500])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (3, 5)])
def test_drafts_are_those_of_token_histories(width: int, lengths: tuple[int, int], *, repeats: bool) -> None:
    rng = np.random.default_rng(width)
    vocab_size = 3 if width == 40 else 5  # few tokens, so that there are matches
    history_RW = torch.from_numpy(rng.integers(0, vocab_size, (SLOTS, width)).astype(np.int32))
    slots = rng.permutation(SLOTS)[:7]
    sizes = np.array([0, 1, 2, width // 2, width - 1, width - 2, 7])
    counts = np.array([6, 6, 6, 6, 6, 2, 1])
    given = (torch.from_numpy(array) for array in (slots, sizes, counts))
    drafts_RK = torch.full((SLOTS, K), -7)
    find_drafts(history_RW, *given, drafts_RK, *lengths, repeats=repeats)
    num_found = 0
    for slot, size, count in zip(slots, sizes, counts, strict=True):
        tokens = history_RW[slot, :size].tolist()
        expected = NgramDrafter(*lengths).propose("r", tokens, int(count)) if size else []
        num_found += bool(expected)
        if repeats and size > 1 and not expected:
            expected = [tokens[-1]] * count
        assert drafts_RK[slot].tolist() == expected + [-1] * (K - len(expected)), (slot, size)
    assert num_found >= 3
    others = sorted(set(range(SLOTS)) - set(slots.tolist()))
    assert bool((drafts_RK[others] == -7).all())


def test_tokens_are_appended_to_their_histories() -> None:
    """Two sequences: three tokens, two of them sampled, and one token. What a model calls positions does not matter."""
    history_RW = torch.zeros(3, 8, dtype=torch.int32)
    lengths = StepLengths(
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([7, 5], dtype=torch.int32),
        num_seqs=2,
        num_tokens=4,
        max_query_len=3,
        max_seq_len=7,
    )
    slots_L, sequences_L, rows_L = torch.tensor([2, 0, 2]), torch.tensor([0, 1, 0]), torch.tensor([2, 3, 0])
    append_tokens(history_RW, slots_L, sequences_L, rows_L, lengths, torch.tensor([5, 6, 7]))
    expected = torch.zeros(3, 8, dtype=torch.int32)
    expected[2, 7], expected[0, 5], expected[2, 5] = 5, 6, 7
    assert torch.equal(history_RW, expected)

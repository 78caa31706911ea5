# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""The Triton kernels of sampling on a GPU: the argmax, and draws that follow the distribution."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.sampling.triton_sampling import greedy_tokens, sample_tokens
from tests.support.cuda import CUDA, random


@pytest.mark.parametrize("vocab", [50, 8192, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    logits = random(9, vocab, dtype=dtype)
    tokens, best = greedy_tokens(logits)
    first = (logits == logits.max(1, keepdim=True).values).int().argmax(1)
    assert torch.equal(tokens, first)
    assert torch.equal(best, logits.max(1).values.float())


def test_sampling_follows_the_distribution() -> None:
    vocab, draws = 1000, 20000
    logits = random(1, vocab, dtype=torch.float32) * 2

    def full(value: float) -> torch.Tensor:
        return torch.full((draws,), value, device=CUDA)

    tokens, _ = sample_tokens(
        logits.expand(draws, vocab),
        full(0.7),
        torch.full((draws,), 40, device=CUDA, dtype=torch.int32),
        full(0.9),
        full(0.0),
        torch.full((draws,), 3, device=CUDA),
        torch.arange(draws, device=CUDA),
    )
    scaled = logits[0] / 0.7
    kept = torch.where(scaled >= scaled.topk(40).values[-1], scaled, -torch.inf).softmax(0)
    ordered, order = kept.sort(descending=True)
    kept[order[ordered.cumsum(0) - ordered >= 0.9]] = 0
    kept /= kept.sum()
    seen = torch.bincount(tokens, minlength=vocab) / draws
    assert seen[kept == 0].sum() == 0
    assert 0.5 * (seen - kept).abs().sum() < 0.03

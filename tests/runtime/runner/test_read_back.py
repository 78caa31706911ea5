"""Sampled tokens on their way to a host with memory of its own."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.runtime.runner.read_back import ReadBack
from tests.support.platforms import OwnMemory


class WithoutViews(OwnMemory):
    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such address")


@pytest.mark.parametrize("platform", [OwnMemory, WithoutViews])
def test_tokens_hold_until_the_third_step_after(platform: type[OwnMemory], caplog: pytest.LogCaptureFixture) -> None:
    read_back = ReadBack(platform(torch.device("cpu")), 8)
    taken = []
    for step in range(7):
        rows = 1 + step % 4
        tokens_S, best_S = torch.arange(rows) + (100 << 40) + step, torch.full((rows,), float(step))
        best_S[0] = float("-inf") if step % 2 else float("nan")
        taken.append((read_back.take(tokens_S, best_S), tokens_S.numpy().copy(), best_S.numpy().copy()))
        tokens_S.zero_()
        for (tokens, best), expected_tokens, expected_best in taken[-3:]:
            assert tokens.tolist() == expected_tokens.tolist()
            assert best.tobytes() == expected_best.tobytes() or best[0] != best[0]
            assert best[1:].tolist() == expected_best[1:].tolist()
    assert caplog.text.count("no such address") == (platform is WithoutViews)

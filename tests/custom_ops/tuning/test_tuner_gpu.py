"""Measuring on a GPU: the faster function is chosen, from graphs and from plain calls, and nothing is measured inside a capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.tuning import tuner as choices

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> choices.Choices:
    fresh = choices.Choices(tmp_path / "choices.json")
    monkeypatch.setattr(choices, "choices_of", lambda device: fresh)
    return fresh


@pytest.mark.parametrize("num_tokens", [16, 300])
@pytest.mark.parametrize("size", [512, 8192])  # a replayed graph is timed, or plain calls
def test_the_faster_one(kept: choices.Choices, size: int, num_tokens: int) -> None:
    weight = torch.randn(size, size, device=CUDA)
    x = torch.randn(1024, size, device=CUDA)
    calls: list[str] = []

    def run(name: str, times: int):
        def call(weight: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            for _ in range(times):
                y = x @ weight
            return y

        return call

    def fails(weight: torch.Tensor) -> torch.Tensor:
        raise ValueError("not here")

    runs = {"fails": fails, "slow": run("slow", 8), "fast": run("fast", 1)}
    assert choices.fastest("matmul", num_tokens, runs, weight) == "fast"
    count = len(calls)
    assert choices.fastest("matmul", num_tokens, runs, weight) == "fast"
    assert len(calls) == count
    assert choices.unmeasured_token_counts(CUDA, num_tokens) == tuple(
        n for n in choices.token_ranges(256) if n < num_tokens
    )


def test_nothing_is_measured_inside_a_capture(kept: choices.Choices) -> None:
    weight = torch.randn(64, 64, device=CUDA)
    runs = {"a": lambda weight: weight + 1, "b": lambda weight: weight + 2}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = runs[choices.fastest("x", 100, runs, weight)](weight)
    graph.replay()
    assert torch.equal(result, weight + 1)
    assert choices.unmeasured_token_counts(CUDA, 128) == (1, 16, 32, 64, 128)

"""Measuring on a GPU: the faster kernel is chosen, from graphs and from plain calls, and nothing is measured inside a capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.tuning import fastest_kernel as module
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel
from compile_and_serve.custom_ops.tuning.token_ranges import token_ranges
from compile_and_serve.custom_ops.tuning.tuner import Problem, Tuner

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    fresh = Tuner("a device", [tmp_path])
    monkeypatch.setattr(module, "tuner_of", lambda device: fresh)
    return fresh


@pytest.mark.parametrize("num_tokens", [16, 300])
@pytest.mark.parametrize("size", [512, 8192])  # a replayed graph is timed, or plain calls
def test_the_faster_one(tuner: Tuner, size: int, num_tokens: int) -> None:
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

    kernels = {"fails": fails, "slow": run("slow", 8), "fast": run("fast", 1)}
    problem = Problem(kind="linear", name="matmul", num_tokens=num_tokens)
    assert fastest_kernel(problem, kernels, weight) == "fast"
    count = len(calls)
    assert fastest_kernel(problem, kernels, weight) == "fast"
    assert len(calls) == count
    expected = tuple(n for n in token_ranges(256) if n < num_tokens)
    assert tuner.unmeasured_token_counts(num_tokens) == expected


def test_nothing_is_measured_inside_a_capture(tuner: Tuner) -> None:
    weight = torch.randn(64, 64, device=CUDA)
    kernels = {"a": lambda weight: weight + 1, "b": lambda weight: weight + 2}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        name = fastest_kernel(Problem(kind="linear", name="x", num_tokens=100), kernels, weight)
        result = kernels[name](weight)
    graph.replay()
    assert torch.equal(result, weight + 1)
    assert tuner.unmeasured_token_counts(128) == (1, 16, 32, 64, 128)

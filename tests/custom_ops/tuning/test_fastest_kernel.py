"""When kernels of a linear are measured, on a fake device: not for a request, not inside a capture, not in `compile_ahead`."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

from compile_and_serve.custom_ops.tuning import fastest_kernel as module
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel
from compile_and_serve.custom_ops.tuning.tuner import Problem, Tuner, tuning_off

PROBLEM = Problem(kind="linear", name="x", num_tokens=100)
WEIGHT = types.SimpleNamespace(device=torch.device("cuda"))


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    made = Tuner("a device")
    monkeypatch.setattr(module, "tuner_of", lambda device: made)
    return made


@pytest.mark.usefixtures("tuner")
def test_no_request_waits_for_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class WeightTimer:
        def __init__(self, weight: object, *, is_cold: bool) -> None: ...

        def seconds(self, kernel: Callable[[torch.Tensor], object]) -> float:
            asked.append("measured")
            return float(len(asked) == 1)

        def free_memory(self) -> None: ...

    monkeypatch.setattr(module, "_WeightTimer", WeightTimer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels: dict[str, Callable[[torch.Tensor], object]] = {"a": lambda weight: weight, "b": lambda weight: weight}
    with tuning_off():
        assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "a"  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "a"  # type: ignore[arg-type]
    assert not asked
    assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "b"  # type: ignore[arg-type]
    with tuning_off():
        assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "b"  # type: ignore[arg-type]
    assert len(asked) == 2


def test_ahead_every_kernel_is_compiled_and_none_chosen(monkeypatch: pytest.MonkeyPatch, tuner: Tuner) -> None:
    ran: list[str] = []
    monkeypatch.setattr(module, "is_compiling_ahead", lambda: True)

    def fails(weight: object) -> None:
        ran.append("b")
        raise RuntimeError("too much shared memory")

    kernels: dict[str, Callable[[torch.Tensor], object]] = {"a": lambda weight: ran.append("a"), "b": fails}
    with tuning_off():
        assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "a"  # type: ignore[arg-type]
    assert not ran
    assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "a"  # type: ignore[arg-type]
    assert ran == ["a", "b"]
    assert tuner.kept(PROBLEM) is None
    tuner.fastest(PROBLEM, {"a": 2.0, "b": 1.0}, lambda seconds: seconds)
    assert fastest_kernel(PROBLEM, kernels, WEIGHT) == "b"  # type: ignore[arg-type]
    assert ran == ["a", "b"]


def test_without_a_gpu_the_first_is_the_choice() -> None:
    assert fastest_kernel(PROBLEM, {"a": lambda weight: weight, "b": lambda weight: weight}, torch.zeros(4)) == "a"

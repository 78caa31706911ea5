"""The timer on the CPU: seconds of one call, whatever its length."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from compile_and_serve.custom_ops.platforms import cpu
from compile_and_serve.custom_ops.tuning.timer import call_seconds


def test_times_are_of_one_call_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def takes(seconds: float, first: float) -> Callable[[int], None]:
        durations = itertools.chain([first], itertools.repeat(seconds))

        def call(number: int) -> None:
            nonlocal now
            now += next(durations)

        return call

    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: now))
    calls = [takes(1e-6, first=1.0), takes(2e-3, first=1.0)]  # the first call is a warm-up
    rounds = call_seconds(calls, torch.device("cpu"), num_calls=1, num_rounds=3)
    assert rounds == [pytest.approx([s] * 3) for s in (1e-6, 2e-3)]

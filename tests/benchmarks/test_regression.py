"""What `benchmarks.regression` calls a regression."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.regression import findings, times_of


def start(step_ms: float, prompt_s: float, first_token_s: float = 8.0) -> list[dict[str, Any]]:
    """The rows of one start."""
    return [
        {"work": "startup", "first_token_s": first_token_s},
        {"work": "decode", "batch": 1, "step_ms": step_ms},
        {"work": "prefill", "n": 1, "prompt": 1024, "s": prompt_s},
    ]


def test_times_are_milliseconds_and_the_first_start_is_bare() -> None:
    times = times_of([start(4.0, 0.025, 30.0), start(4.1, 0.024)])
    assert times == {"start, bare": [30e3], "start, warm": [8e3], "decode of 1": [4.0, 4.1], "1 x 1024 tokens": [25.0, 24.0]}


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([start(4.0, 0.025, 90.0), start(4.05, 0.025, 90.0)], []),
        ([start(4.3, 0.025), start(4.3, 0.025)], ["8b: decode of 1 takes 1.075 of the time before"]),
        ([start(4.0, 0.027), start(4.0, 0.027)], ["8b: 1 x 1024 tokens takes 1.080 of the time before"]),
        ([start(3.5, 0.025), start(4.0, 0.025)], ["8b: decode of 1 differs from start to start: 3.500, 4.000 ms"]),
    ],
    ids=["equal", "slower step", "slower prompt", "steps that differ"],
)
def test_slower_figures_are_found(ours: list[list[dict[str, Any]]], expected: list[str]) -> None:
    base = times_of([start(4.0, 0.025), start(4.0, 0.025)])
    assert findings("8b", base, times_of(ours), 0.02) == expected

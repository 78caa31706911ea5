"""The detector of endless repetition."""

from __future__ import annotations

import random

import pytest

from compile_and_serve.runtime.sampling_params import RepetitionDetectionParams, SamplingParams, SamplingParamsError
from compile_and_serve.runtime.scheduler.repetition import repeats
from tests.support import scheduler_harness
from tests.support.scheduler_harness import Driver, make_request, make_scheduler


def by_definition(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    sizes = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
    return any(
        len(tokens) >= size * params.min_count and tokens[-size * params.min_count :] == tokens[-size:] * params.min_count for size in sizes
    )


def test_repeats_is_its_definition() -> None:
    random.seed(1)
    found = 0
    for _ in range(20_000):
        tokens = [random.randrange(2) for _ in range(random.randint(1, 16))]
        largest = random.randint(1, 5)
        params = RepetitionDetectionParams(
            max_pattern_size=largest, min_pattern_size=random.randint(0, largest), min_count=random.randint(2, 4)
        )
        expected = by_definition(tokens, params)
        found += expected
        around = [0] * 3 + tokens + [1] * 2  # the prompt, and tokens that come later
        assert repeats(around, 3, 3 + len(tokens), params) == expected, (tokens, params)
    assert 1000 < found < 19_000


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "params, num_tokens, reason",
    [
        ({"max_pattern_size": 3, "min_count": 3}, 9, "repetition"),
        ({"max_pattern_size": 8, "min_pattern_size": 4, "min_count": 2}, 12, "repetition"),
        ({"max_pattern_size": 2, "min_count": 2}, 40, "length"),
        ({"max_pattern_size": 0, "min_count": 2}, 40, "length"),
        ({"max_pattern_size": 3, "min_count": 2, "min_tokens": 20}, 20, "repetition"),
    ],
)
def test_request_ends_when_its_output_repeats(
    monkeypatch: pytest.MonkeyPatch, depth: int, params: dict[str, int], num_tokens: int, reason: str
) -> None:
    """The model writes a pattern of three tokens, after a prompt of the same pattern, which does not count."""
    monkeypatch.setattr(scheduler_harness, "next_token", lambda tokens: len(tokens) % 3)
    params = dict(params)
    least = params.pop("min_tokens", 0)
    driver = Driver(make_scheduler(max_model_len=64), depth)
    detection = RepetitionDetectionParams(**params)
    request = make_request("r", [0, 1, 2, 0, 1, 2], max_tokens=40, min_tokens=least, repetition_detection=detection)  # type: ignore[arg-type]
    driver.add(request)
    answer = driver.run()["r"]
    assert (len(answer.tokens), answer.finish_reason) == (num_tokens, reason)
    assert answer.stop_reason == ("repetition_detected" if reason == "repetition" else None)
    assert driver.scheduler.manager.usage == 0.0


@pytest.mark.parametrize(
    "values",
    [
        {"max_pattern_size": 257, "min_count": 2},
        {"max_pattern_size": -1, "min_count": 2},
        {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 4},
        {"max_pattern_size": 256, "min_count": 17},
    ],
)
def test_values_out_of_range(values: dict[str, int]) -> None:
    with pytest.raises(SamplingParamsError, match="repetition_detection must be given"):
        SamplingParams(repetition_detection=RepetitionDetectionParams(**values)).verify()

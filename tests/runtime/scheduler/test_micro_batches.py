"""Steps of a model in stages: prompts are spread over them, because all stages wait for the one with the longest step."""

from __future__ import annotations

import pytest

from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.scheduler import micro_batches
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from tests.support.scheduler_harness import BLOCK, Driver, assert_as_alone, make_request


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "MIN_PROMPT_TOKENS", 8)
    monkeypatch.setattr(micro_batches, "MAX_PROMPT_TOKENS", 32)


def staged(num_stages: int, budget: int = 512) -> Driver:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, async_scheduling=True)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    scheduler = Scheduler(config, cache, num_blocks=600, max_model_len=400, num_stages=num_stages)
    return Driver(scheduler, depth=num_stages)


def prompt_tokens(driver: Driver, num_steps: int) -> list[int]:
    """Of the next steps, of which the first ones have no decodes."""
    steps = [driver.step() for _ in range(num_steps)]
    return [0 if step is None else step.total_num_scheduled_tokens - step.num_decodes for step in steps]


def test_prompts_at_hand_are_spread_over_steps() -> None:
    driver = staged(2)
    driver.add(*(make_request(name, [1 + i % 30 for i in range(96)], max_tokens=1) for name in "ab"))
    assert prompt_tokens(driver, 10) == [24, 21, 18, 16, 14, 12, 10, 9, 8, 8]  # an eighth of what is left, and no fewer than 8


def test_a_long_prompt_goes_through_the_stages_in_chunks() -> None:
    driver = staged(2)
    driver.add(make_request("a", [1 + i % 30 for i in range(300)], max_tokens=1))
    assert prompt_tokens(driver, 6) == [32, 32, 29, 25, 22, 20]


def test_prompts_that_find_no_slot_are_not_at_hand() -> None:
    driver = staged(2)
    driver.add(*(make_request(f"a{i}", [1 + i] * 4, max_tokens=1) for i in range(8)))
    driver.add(*(make_request(f"b{i}", [1 + i] * 100, max_tokens=1) for i in range(8)))
    assert prompt_tokens(driver, 1) == [8]


@pytest.mark.parametrize(("num_stages", "budget", "expected"), [(1, 512, [64, 0]), (2, 8, [8, 8])])
def test_one_stage_and_short_steps_spread_nothing(num_stages: int, budget: int, expected: list[int]) -> None:
    driver = staged(num_stages, budget)
    driver.add(make_request("a", range(1, 31), max_tokens=1), make_request("b", range(1, 35), max_tokens=1))
    assert prompt_tokens(driver, 2) == expected


def test_every_request_gets_the_tokens_that_it_gets_alone() -> None:
    driver = staged(3)
    requests = [make_request(f"r{i}", [1 + (i * 7 + at) % 30 for at in range(5 + 11 * i)], max_tokens=20) for i in range(20)]
    driver.add(*requests)
    answers = driver.run()
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 400)

"""A preempted request loses its blocks, comes back in its place, and gets the same tokens."""

import pytest

from compile_and_serve.runtime.scheduler import scheduler as scheduler_module
from tests.support.scheduler_harness import Driver, assert_as_alone, make_request, make_scheduler


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_preemption_in_a_tiny_pool_changes_no_token(depth: int, caching: bool) -> None:
    """6 sequences that grow to 9 blocks each share 12: most must be recomputed, some of them several times."""
    scheduler = make_scheduler(num_blocks=12, caching=caching, max_model_len=60)
    requests = [make_request(f"r{index}", [index, 1, 2], max_tokens=30) for index in range(6)]
    driver = Driver(scheduler, depth)
    driver.add(*requests)
    answers = driver.run()
    assert scheduler.stats().num_preemptions >= 3
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 48)
    resumed = [new for step in driver.steps for new in step.new_requests if len(new.token_ids) > new.num_prompt_tokens]
    assert len(resumed) > 0
    assert any(new.num_computed_tokens > 0 for new in resumed) == caching


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_preemption_between_two_chunks_of_a_prefill(depth: int, prompt_logprobs: int | None) -> None:
    scheduler = make_scheduler(num_blocks=5, budget=2)
    requests = [make_request("first", [9], max_tokens=16), make_request("long", range(12), prompt_logprobs=prompt_logprobs, max_tokens=5)]
    driver = Driver(scheduler, depth)
    driver.add(*requests)
    answers = driver.run()
    long_runs = [new for step in driver.steps for new in step.new_requests if new.request_id == "long"]
    assert len(long_runs) == 2
    assert len(long_runs[1].token_ids) == 12  # it had generated nothing when it was preempted
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 20)


def test_the_last_to_come_is_preempted_and_resumes_before_those_behind_him() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2, max_model_len=24)
    driver = Driver(scheduler)
    driver.add(*(make_request(name, [index] * 7, max_tokens=14) for index, name in enumerate("abc")))
    driver.run()
    order = [new.request_id for step in driver.steps for new in step.new_requests]
    assert order[:3] == ["a", "b", "b"]
    assert order[-1] == "c"


def test_the_lowest_priority_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8, policy="priority", max_model_len=32)
    driver = Driver(scheduler)
    driver.add(make_request("low", [1] * 6, priority=5, max_tokens=14))
    driver.step()
    driver.add(make_request("high", [2] * 6, priority=-1, max_tokens=14))
    answers = driver.run()
    preempted = {request_id for step in driver.steps for request_id in step.finished_request_ids} & {"low"}
    assert scheduler.stats().num_preemptions > 0
    assert preempted == {"low"}
    admissions = [new.request_id for step in driver.steps for new in step.new_requests]
    assert admissions.count("high") == 1
    assert len(answers["low"].tokens) == len(answers["high"].tokens) == 14


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_resumes_asks_no_second_time_for_what_its_prompt_brought(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 7)
    driver = Driver(make_scheduler(num_blocks=9, budget=40), depth)
    requests = [make_request("first", [3], max_tokens=30), make_request("asks", range(1, 13), prompt_logprobs=0, max_tokens=18)]
    driver.add(*requests)
    answers = driver.run()
    begun, *resumed = [new for step in driver.steps for new in step.new_requests if new.request_id == "asks"]
    assert begun.sampling_params.prompt_logprobs == 0
    assert [new.sampling_params.prompt_logprobs for new in resumed if len(new.token_ids) > 12] == [None] * len(resumed)
    assert len(resumed) > 0
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 36)


def test_a_request_that_resumes_shares_what_its_steps_in_flight_compute() -> None:
    driver = Driver(make_scheduler(num_blocks=5, budget=2), depth=2)
    driver.add(make_request("first", [9], max_tokens=16), make_request("long", range(12), max_tokens=2))
    for _ in range(9):
        driver.step()
    assert "long" in driver.steps[8].finished_request_ids
    driver.scheduler.abort(["first"])
    driver.step()
    assert [(new.request_id, new.num_computed_tokens) for new in driver.steps[9].new_requests] == [("long", 8)]
    assert [step.step for step, _ in driver.in_flight] == [8, 9]
    driver.run()

"""How requests end: stop tokens, lengths, aborts and errors. Every block comes back."""

import pytest

from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT
from tests.support.scheduler_harness import Driver, assert_as_alone, expected_answer, make_request, make_scheduler, next_token


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "params, num_tokens, finish_reason, stop_reason",
    [
        ({"max_tokens": 3}, 3, "length", None),
        ({"max_tokens": None}, 60, "length", None),
        ({"max_tokens": 0}, 0, "length", None),
        ({"end": 4}, 5, "stop", None),
        ({"end": 4, "ignore_eos": True}, 12, "length", None),
        ({"stop": 2}, 3, "stop", "token"),
        ({"stop": 2, "end": 4}, 3, "stop", "token"),
        ({"stop": 2, "end": 4, "min_tokens": 4}, 5, "stop", None),
        ({"stop": 2, "max_tokens": 3}, 3, "stop", "token"),
        ({"stop": 0}, 1, "stop", "token"),
    ],
)
def test_stop_conditions(depth: int, params: dict[str, int | None], num_tokens: int, finish_reason: str, stop_reason: str | None) -> None:
    """`end` and `stop` say at which output position the (then unique) end or stop token comes."""
    prompt = [5, 9, 2, 31]
    free_run = expected_answer(make_request("r", prompt, max_tokens=12), 64).tokens
    params = {"max_tokens": 12} | params
    end, stop = params.pop("end", None), params.pop("stop", None)
    end_ids = [] if end is None else [free_run[end]]
    stop_ids = ([] if params.get("ignore_eos") else end_ids) + ([] if stop is None else [free_run[stop]])
    for position in (end, stop):
        assert position is None or free_run.index(free_run[position]) == position
    request = make_request("r", prompt, end_ids=end_ids, stop_ids=stop_ids, **params)
    driver = Driver(make_scheduler(max_model_len=64), depth)
    driver.add(request)
    answer = driver.run()["r"]
    assert (len(answer.tokens), answer.finish_reason) == (num_tokens, finish_reason)
    assert answer.stop_reason == (None if stop_reason is None else answer.tokens[-1])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_never_scheduled_beyond_the_length_limit(depth: int) -> None:
    driver = Driver(make_scheduler(), depth)
    driver.add(make_request("r", [1, 2, 3], max_tokens=5))
    driver.run()
    assert sum(step.total_num_scheduled_tokens for step in driver.steps) == 3 + 4


def test_token_computed_after_the_end_is_discarded_and_the_id_may_be_used_again() -> None:
    prompt = [5, 9, 2, 31]
    end_id = next_token(prompt)
    driver = Driver(make_scheduler(num_blocks=3, max_model_len=12), depth=1)
    driver.add(make_request("r", prompt, end_ids=[end_id], max_tokens=6))
    driver.step()
    driver.step()  # schedules the decode, then learns that the first token was the last
    assert driver.answers["r"].finish_reason == "stop"
    assert len(driver.in_flight) == 1
    assert driver.scheduler.manager.pool.num_free == 3
    again = make_request("r", [1, 2, 3, 4, 5], max_tokens=6)
    driver.add(again)
    assert_as_alone(driver.run()["r"], again, 12)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_abort_in_every_state(depth: int, num_steps: int, victim: str) -> None:
    """Waiting, between prefill chunks, decoding, preempted, with and without steps in flight."""
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=2, budget=5, max_model_len=20)
    requests = {name: make_request(name, [index] * 7, max_tokens=9) for index, name in enumerate("abc")}
    driver = Driver(scheduler, depth)
    driver.add(*requests.values())
    for _ in range(num_steps):
        driver.step()
    finished = driver.answers[victim].finish_reason is not None
    scheduler.abort([victim, victim])
    driver.check(None)
    answers = driver.run()
    for name, request in requests.items():
        if name != victim or finished:
            assert_as_alone(answers[name], request, 20)
        else:
            assert answers[name].finish_reason is None


@pytest.mark.parametrize("error,kind", [("Its logits are not finite.", "internal"), (NOTHING_LEFT, "invalid")])
def test_one_failed_request_takes_no_other_down(error: str, kind: str) -> None:
    driver = Driver(make_scheduler())
    good = make_request("good", [1, 2], max_tokens=5)
    driver.add(good, make_request("bad", [3, 4], max_tokens=5))
    driver.step()
    driver.runner.fail_on["bad"] = error
    answers = driver.run()
    assert answers["bad"].finish_reason == "error"
    last = answers["bad"].outputs[-1]
    assert (last.error, last.error_kind) == (error, kind)
    assert_as_alone(answers["good"], good, 128)


def test_fail_all_ends_everything_with_the_reason() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1), depth=1)
    driver.add(make_request("a", range(9)), make_request("b", [2]))
    driver.step()
    outputs = driver.scheduler.fail_all("The device is lost.")
    assert {(output.request_id, output.finish_reason, output.error) for output in outputs} == {
        ("a", "error", "The device is lost."),
        ("b", "error", "The device is lost."),
    }
    assert not driver.scheduler.has_work()
    assert driver.scheduler.manager.usage == 0.0
    assert driver.scheduler.manager.pool.cached == {}
    assert driver.scheduler.schedule() is None


def test_a_cache_smaller_than_the_model_ends_a_lone_sequence_with_length(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=100)
    assert "sequences end at 12 tokens" in caplog.text
    driver = Driver(scheduler)
    driver.add(make_request("r", [1, 2, 3], max_tokens=None))
    answer = driver.run()["r"]
    assert (len(answer.tokens), answer.finish_reason) == (9, "length")
    assert scheduler.stats().num_preemptions == 0

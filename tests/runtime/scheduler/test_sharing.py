"""Requests share what others compute: equal prompts, siblings, and what happens when the first of them fails."""

import random
from unittest.mock import patch

import msgspec
import pytest

from compile_and_serve.runtime.messages import Sibling
from compile_and_serve.runtime.scheduler import admission
from compile_and_serve.runtime.scheduler import scheduler as scheduler_module
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError
from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT, StateGroupInfo
from tests.support.scheduler_harness import VOCAB, Driver, assert_as_alone, make_request, make_scheduler


def held_blocks(driver: Driver) -> int:
    pool = driver.scheduler.manager.pool
    return pool.num_blocks - pool.num_free


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_one_message", [False, True])
def test_equal_prompts_are_computed_once_and_share_their_blocks(depth: int, is_one_message: bool) -> None:
    driver = Driver(make_scheduler(num_blocks=2000, budget=4096, max_model_len=2100, groups=[StateGroupInfo("tokens", 16)]), depth)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(2000)]
    requests = [make_request(f"r{i}", prompt, max_tokens=4) for i in range(8)]
    if is_one_message:
        siblings = [Sibling(request.request_id) for request in requests[1:]]
        driver.add(msgspec.structs.replace(requests[0], siblings=siblings))
    else:
        driver.add(*requests)
    steps = [driver.step(), driver.step()]
    assert [len(step.new_requests) for step in steps if step is not None] == [1, 7]
    assert held_blocks(driver) == 125 + 8 * 1  # 2000 / 16 blocks, and one for the first token of each
    answers = driver.run()
    assert driver.runner.num_prefilled == 2000 + 7 * 16  # the last block's logits are needed by each
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 2100)


def test_a_prompt_in_several_chunks_is_computed_once() -> None:
    driver = Driver(make_scheduler(num_blocks=400, budget=150, max_model_len=600))
    driver.add(*(make_request(f"r{i}", [j % 7 for j in range(400)], max_tokens=2) for i in range(4)))
    driver.run()
    assert driver.runner.num_prefilled == 400 + 3 * 4


def test_requests_behind_one_that_waits_to_share_run_and_take_nothing_that_it_needs() -> None:
    driver = Driver(make_scheduler(num_blocks=90, max_num_seqs=4, budget=1000, max_model_len=256))
    shared = [i % 11 for i in range(200)]
    driver.add(make_request("first", shared), make_request("second", shared), make_request("other", [7] * 140))
    driver.add(*(make_request(f"more{i}", [8 + i] * 5) for i in range(3)))
    step = driver.step()
    assert step is not None
    # 50 blocks for the first, 2 promised to the second, 35 for the other's 140 tokens are too many by the blocks kept back.
    assert [new.request_id for new in step.new_requests] == ["first", "other"]
    step = driver.step()
    assert step is not None
    assert [new.request_id for new in step.new_requests] == ["second"]
    driver.run()


def test_little_to_share_is_not_waited_for() -> None:
    driver = Driver(make_scheduler(num_blocks=400, budget=1000, max_model_len=256))
    common = [3] * 60
    driver.add(*(make_request(f"r{i}", [*common, *[i] * 60]) for i in range(3)))
    step = driver.step()
    assert step is not None
    assert len(step.new_requests) == 3
    driver.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("how", ["aborts", "fails", "fails and is gone"])
def test_what_a_request_leaves_half_done_is_read_by_nobody(depth: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several equal prompts ends before the result of its first step is known."""
    monkeypatch.setattr(admission, "MIN_SHARED_TOKENS", 1)
    driver = Driver(make_scheduler(budget=12, num_blocks=40), depth)
    requests = [make_request(name, range(30), max_tokens=5) for name in "abcd"]
    driver.add(*requests)
    if how != "aborts":
        driver.runner.poison.add("a")
        driver.runner.fail_on["a"] = "Its logits are not finite."
    for _ in range(depth + 1):
        driver.step()
    if how != "fails" and driver.answers["a"].finish_reason is None:
        driver.scheduler.abort("a")
    answers = driver.run()
    for request in requests[1:]:
        assert_as_alone(answers[request.request_id], request, 128)
    late = make_request("late", range(30), max_tokens=5)
    driver.add(late)
    assert_as_alone(driver.run()["late"], late, 128)


def test_sharers_of_a_prefill_that_failed_start_again() -> None:
    """With two steps in flight, the sharers run before the failure of the first is known."""
    driver = Driver(make_scheduler(budget=200, num_blocks=200, max_model_len=256), depth=2)
    prompt = [i % 13 for i in range(140)]
    requests = [make_request(name, prompt, max_tokens=9) for name in "abc"]
    driver.add(*requests, other := make_request("other", [1, 2, 3], max_tokens=9))
    driver.runner.poison.add("a")
    driver.runner.fail_on["a"] = "Its logits are not finite."
    answers = driver.run()
    assert answers["a"].finish_reason == "error"
    for request in (*requests[1:], other):
        assert_as_alone(answers[request.request_id], request, 256)
    begun = [[new.request_id for new in step.new_requests] for step in driver.steps]
    assert begun[:2] == [["a", "other"], ["b", "c"]]
    assert [name for names in begun[2:] for name in names] == ["b", "c"]
    assert driver.runner.num_prefilled == 3 + 140 + 2 * 4 + 140 + 4


def test_a_prefix_from_before_survives_a_prefill_that_failed() -> None:
    driver = Driver(make_scheduler(budget=200, num_blocks=200, max_model_len=256), depth=2)
    system = [i % 13 for i in range(140)]
    driver.add(good := make_request("good", system, max_tokens=30))
    driver.step()
    driver.step()
    driver.add(make_request("bad", [*system, *[5] * 20], max_tokens=9))
    driver.runner.poison.add("bad")
    driver.runner.fail_on["bad"] = "Its logits are not finite."
    assert_as_alone(driver.run()["good"], good, 256)
    assert driver.scheduler.stats().num_preemptions == 0
    driver.add(make_request("next", [*system, *[5] * 20], max_tokens=1))
    assert driver.run()["next"].outputs[0].num_cached_tokens == 140


def test_a_users_mistake_costs_the_sharers_nothing() -> None:
    driver = Driver(make_scheduler(budget=200, num_blocks=200, max_model_len=256), depth=2)
    prompt = [i % 13 for i in range(140)]
    driver.add(*(make_request(name, prompt, max_tokens=9) for name in "abc"))
    driver.runner.fail_on["a"] = NOTHING_LEFT
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    assert driver.runner.num_prefilled == 140 + 2 * 4


def test_a_request_that_did_not_fit_starts_when_enough_of_its_prefix_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block becomes free until the first ends. But the second need not hold twice what the first computes, 20 tokens per step."""
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 20)
    driver = Driver(make_scheduler(num_blocks=70, budget=1000, max_model_len=256))
    prompt = [i % 13 for i in range(160)]
    driver.add(make_request("first", prompt, prompt_logprobs=0, max_tokens=90))
    driver.add(make_request("second", [*prompt, 1, 2, 3], max_tokens=4))
    started = next(index for index in range(100) if driver.step() and "second" in driver.runner.held)
    assert started == 3  # it lacks 41 - 15 blocks then, and 29 are spare
    driver.run()


@pytest.mark.exhaustive
def test_long_prompts_are_hashed_and_admitted_a_few_per_step() -> None:
    """Siblings of a long prompt, while another request decodes: no step has the work of all of them."""
    driver = Driver(make_scheduler(num_blocks=4000, max_num_seqs=64, budget=4000, max_model_len=4000))
    driver.add(make_request("decoding", [1], max_tokens=60))
    driver.step()
    request = make_request("r0", [i % 17 for i in range(3000)], max_tokens=1)
    with patch.multiple(admission, HASHED_TOKENS=1000, ADMITTED_TOKENS=9000):
        driver.add(msgspec.structs.replace(request, siblings=[Sibling(f"r{i}") for i in range(1, 32)]))
        [prompt] = {id(request.prompt): request.prompt for request in driver.scheduler._admission.waiting}.values()
        assert prompt.keys == []  # nothing is hashed when it comes
        counts = [len(step.new_requests) for _ in range(14) if (step := driver.step())]
    assert counts == [1, *[3] * 10, 1, 0, 0]
    assert len(prompt.keys) == 750
    assert driver.runner.num_prefilled == 1 + 3000 + 31 * 4
    driver.run()


def test_a_long_cached_prompt_is_hashed_in_several_steps_while_others_run() -> None:
    driver = Driver(make_scheduler(num_blocks=4000, budget=4000, max_model_len=4000))
    prompt = [i % 17 for i in range(3000)]
    driver.add(make_request("first", prompt, max_tokens=1))
    driver.run()
    driver.add(make_request("decoding", [1], max_tokens=30))
    driver.step()
    with patch.object(admission, "HASHED_TOKENS", 1000):
        driver.add(make_request("again", prompt, max_tokens=1))
        assert [len(step.new_requests) for _ in range(4) if (step := driver.step())] == [0, 0, 1, 0]
    assert driver.run()["again"].outputs[0].num_cached_tokens == 2996


def test_siblings_are_refused_together() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_waiting=2)
    five = msgspec.structs.replace(make_request("r", [1, 2]), siblings=[Sibling(f"s{i}") for i in range(4)])
    with pytest.raises(QueueFullError, match="this request adds 5; the limit is 4"):
        scheduler.add_request(five)
    assert not scheduler.has_work()
    scheduler.add_request(msgspec.structs.replace(five, siblings=five.siblings[:3]))
    assert scheduler.stats().num_waiting == 4


def test_siblings_differ_in_their_seeds() -> None:
    scheduler = make_scheduler()
    first = make_request("r", [1, 2], temperature=1.0, seed=5)
    scheduler.add_request(msgspec.structs.replace(first, siblings=[Sibling("s", 6), Sibling("t", 7)]))
    step = scheduler.schedule()
    assert step is not None
    assert {new.request_id: new.sampling_params.seed for new in step.new_requests} == {"r": 5, "s": 6, "t": 7}

"""The scheduler: whatever the limits, every request gets the tokens that it would get alone, and every block comes back."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.scheduler import scheduler as scheduler_module
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo
from tests.support.scheduler_harness import BLOCK, Driver, FakeRunner, assert_as_alone, make_request, make_scheduler
from tests.support.scheduler_workloads import TOKENS, WORKLOADS, check_workload, slots


@example(  # blocks that one prefill leaves behind its window, and another still reads, do not become free
    groups=[StateGroupInfo("tokens", 2, 9)],
    num_blocks=11,
    caching=True,
    seed=41017,
    num_requests=2,
    num_draft_tokens=0,
    max_num_seqs=2,
    budget=5,
    depth=0,
    policy="fcfs",
    num_aborts=0,
    admit_in_groups=False,
    min_gained_tokens=1,
)
@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.one_of(TOKENS, slots(st.booleans())), max_size=3), num_blocks=st.integers(6, 24), caching=st.booleans(), **WORKLOADS
)
def test_random_workloads(groups: list[StateGroupInfo], num_blocks: int, caching: bool, **workload: Any) -> None:
    """Whatever the limits, arrivals, preemptions, failures and aborts: every other request gets its tokens, and every block comes
    back.
    """
    check_workload(groups, num_blocks, caching, **workload)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(TOKENS, max_size=2),
    slot_group=slots(st.just(True)),
    place=st.integers(0, 2),
    num_blocks=st.integers(16, 60),
    **WORKLOADS,
)
def test_random_workloads_with_snapshots(
    groups: list[StateGroupInfo], slot_group: StateGroupInfo, place: int, num_blocks: int, **workload: Any
) -> None:
    """The same where requests take up each other's recurrent state."""
    groups.insert(place, slot_group)
    check_workload(groups, num_blocks, True, **workload)


def test_priority_orders_the_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    driver = Driver(scheduler)
    driver.add(*(make_request(f"p{priority}", [1, 2], priority=priority, max_tokens=2) for priority in (2, 0, 1, -1)))
    driver.run()
    assert [new.request_id for step in driver.steps for new in step.new_requests] == ["p-1", "p0", "p1", "p2"]


def test_long_prefill_is_chunked_and_delays_no_decode() -> None:
    scheduler = make_scheduler(budget=16, num_blocks=128)
    driver = Driver(scheduler)
    driver.add(*(make_request(f"d{index}", [index], max_tokens=40) for index in range(4)))
    driver.step()
    driver.add(make_request("long", [7] * 100, max_tokens=2), make_request("short", [8] * 3, max_tokens=2))
    for index in range(9):
        step = driver.step()
        assert step is not None
        assert [step.num_scheduled_tokens[f"d{decode}"] for decode in range(4)] == [1] * 4
        assert step.total_num_scheduled_tokens == (16 if index < 8 else 4 + 4 + 3)
    assert step.num_scheduled_tokens["long"] == 100 - 8 * 12
    assert step.num_scheduled_tokens["short"] == 3
    assert list(step.num_scheduled_tokens)[:4] == ["d0", "d1", "d2", "d3"]
    assert len(driver.answers["long"].tokens) == 1
    driver.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_logits_of_prompts_take_so_many_rows_of_a_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose logprobs are wanted share the rows; who came before or while they run does not wait for their end."""
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 7)
    driver = Driver(make_scheduler(budget=40, num_blocks=64), depth)
    asking = [make_request(f"asks{i}", range(1, 21), prompt_logprobs=0, max_tokens=3) for i in range(2)]
    plain = make_request("plain", range(31, 1, -1), max_tokens=3)
    driver.add(asking[0], plain, asking[1])
    answers = driver.run()
    rows = [
        sum(count for name, count in step.num_scheduled_tokens.items() if name.startswith("asks") and count > 1) for step in driver.steps
    ]
    assert max(rows) == 7
    assert driver.steps[0].num_scheduled_tokens == {"asks0": 7, "plain": 30}
    for request in (*asking, plain):
        assert_as_alone(answers[request.request_id], request, 128)


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_that_cannot_be_cut_wait_for_a_step_with_room(depth: int) -> None:
    """Also when they resume after a preemption."""
    scheduler = make_scheduler(num_blocks=16, budget=40, max_model_len=40, caching=False, whole_prompts=True)
    driver = Driver(scheduler, depth)
    requests = [make_request(f"r{i}", range(1, 3 + 9 * (i % 4)), max_tokens=9) for i in range(9)]
    driver.add(*requests)
    answers = driver.run()
    for request in requests:
        assert_as_alone(answers[request.request_id], request, scheduler.max_len)
    for step in driver.steps:
        assert sum(step.num_scheduled_tokens.values()) <= 40
        for new in step.new_requests:
            assert step.num_scheduled_tokens[new.request_id] == len(new.token_ids)
    assert scheduler.stats().num_preemptions > 0
    with pytest.raises(ValueError, match="prompt_logprobs are computed in parts of a prompt"):
        driver.add(make_request("asks", [1, 2], prompt_logprobs=0))


def test_more_sequences_than_budget_still_all_advance() -> None:
    scheduler = make_scheduler(budget=4, max_num_seqs=8)
    driver = Driver(scheduler)
    driver.add(*(make_request(f"r{index}", [index] * 2, max_tokens=20) for index in range(8)))
    answers = driver.run()
    assert all(len(answer.tokens) == 20 for answer in answers.values())
    assert max(len(step.num_scheduled_tokens) for step in driver.steps) == 4


def test_a_step_of_unchanged_decodes_says_nothing_more() -> None:
    driver = Driver(make_scheduler())
    driver.add(*(make_request(f"r{index}", [index], max_tokens=9) for index in range(4)))
    steps = [driver.step() for _ in range(8)]
    assert [len(step.cached_requests) for step in steps if step] == [0, 0, 0, 0, 4, 0, 0, 0]
    assert all(not step.new_requests for step in steps[1:] if step)


def test_async_gives_a_step_before_the_last_one_is_known() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler)
    scheduler.add_request(make_request("r", [1, 2], max_tokens=3))
    steps = [scheduler.schedule() for _ in range(4)]
    assert [None if step is None else dict(step.num_scheduled_tokens) for step in steps] == [{"r": 2}, {"r": 1}, {"r": 1}, None]
    outputs = [output for step in steps if step for output in scheduler.update(step, runner.execute(step))]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert not scheduler.has_work()


def test_first_token_carries_times_and_cached_tokens() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", range(9), max_tokens=2))
    driver.run()
    driver.add(make_request("b", range(9), max_tokens=2))
    first, second = driver.run()["b"].outputs
    assert first.num_cached_tokens == 8
    assert first.queue_seconds is not None
    assert first.queue_seconds >= 0
    assert first.prefill_seconds is not None
    assert first.prefill_seconds >= 0
    assert (second.queue_seconds, second.prefill_seconds) == (None, None)
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)


def test_a_block_that_an_aborted_request_left_incomplete_is_no_hit() -> None:
    """After its first decode it knows 4 tokens, a full block; the keys and values of the last were never computed."""
    driver = Driver(make_scheduler())
    driver.add(make_request("a", [5, 6]))
    driver.step()
    driver.step()
    known = [5, 6, *driver.answers["a"].tokens]
    assert len(known) == BLOCK
    driver.scheduler.abort(["a"])
    driver.add(make_request("b", [*known, 7]))
    assert driver.run()["b"].outputs[0].num_cached_tokens == 0


def test_salts_share_nothing() -> None:
    driver = Driver(make_scheduler())
    for name, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", "x")]:
        driver.add(make_request(name, range(9), salt=salt, max_tokens=2))
        driver.run()
    cached = [driver.answers[name].outputs[0].num_cached_tokens for name in "abcd"]
    assert cached == [0, 0, 0, 8]


def test_what_can_never_run_is_refused_in_a_sentence() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=32)
    for request, message in [
        (make_request("r", []), "no tokens"),
        (make_request("r", range(32)), "no room for output in the model's 32"),
        (make_request("r", range(16)), "the whole KV cache holds 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            scheduler.add_request(request)
    assert not scheduler.has_work()
    scheduler.add_request(make_request("r", range(15)))
    scheduler.add_request(make_request("prompt only", range(16), max_tokens=0))
    with pytest.raises(ValueError, match="ids must be unique"):
        scheduler.add_request(make_request("r", [1]))


def test_full_queue_refuses_and_opens_again() -> None:
    driver = Driver(make_scheduler(max_num_seqs=2, max_waiting=1))
    driver.add(*(make_request(f"r{index}", [index]) for index in range(3)))
    with pytest.raises(QueueFullError, match="3 sequences"):
        driver.scheduler.add_request(make_request("r3", [1]))
    driver.run()
    driver.add(make_request("r3", [1]))
    driver.run()


def test_reset_prefix_cache_only_when_idle() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", range(9), max_tokens=2))
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    driver.add(make_request("b", range(9), max_tokens=2))
    assert driver.run()["b"].outputs[0].num_cached_tokens == 0


def test_a_request_that_waits_for_rows_lets_others_pass_and_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 7)
    driver = Driver(make_scheduler(budget=40, num_blocks=64, max_num_seqs=4))
    asking = [make_request(f"asks{i}", range(1, 21), prompt_logprobs=0, max_tokens=30) for i in range(2)]
    plain = [make_request(f"plain{i}", [i] * 5, max_tokens=30) for i in range(3)]
    driver.add(*asking, *plain)
    steps = [step for _ in range(4) if (step := driver.step())]
    # Of the four slots one is kept for the second that asks.
    assert [new.request_id for new in steps[0].new_requests] == ["asks0", "plain0", "plain1"]
    assert [new.request_id for step in steps[1:] for new in step.new_requests] == ["asks1"]
    answers = driver.run()
    for request in (*asking, *plain):
        assert_as_alone(answers[request.request_id], request, 128)

"""The scheduler: whatever the limits, every request gets the tokens that it would get alone, and every block comes back."""

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.scheduler import free_slots
from compile_and_serve.runtime.scheduler import scheduler as scheduler_module
from compile_and_serve.runtime.scheduler.scheduler import QueueFullError
from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT, PagedGroup
from tests.support.scheduler_harness import (
    BLOCK,
    END_ID,
    VOCAB,
    Driver,
    FakeRunner,
    assert_as_alone,
    expected_answer,
    make_request,
    make_scheduler,
    next_token,
)

GROUPS = st.lists(st.builds(PagedGroup, st.sampled_from([2, 4, 8]), st.sampled_from([None, 1, 5, 9])), max_size=3)
# Small enough that all of them matter in small tests.
SMALL_LIMITS = {"PROMPT_LOGPROB_ROWS": 12, "HASHED_TOKENS": 8, "ADMITTED_TOKENS": 40}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 16),
    num_blocks=st.integers(6, 24),
    groups=GROUPS,
    num_draft_tokens=st.integers(0, 3),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(4, 24),
    depth=st.integers(0, 3),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    num_aborts=st.integers(0, 3),
    admit_in_groups=st.booleans(),
    min_gained_tokens=st.sampled_from([1, 5, 100]),
)
def test_random_workloads(
    seed: int, num_requests: int, num_blocks: int, groups: list[PagedGroup], num_draft_tokens: int, max_num_seqs: int,
    budget: int, depth: int, caching: bool, policy: str, num_aborts: int, admit_in_groups: bool, min_gained_tokens: int,
) -> None:  # fmt: skip
    """Whatever the limits, arrivals, preemptions, failures and aborts: every other request gets its tokens, and every block comes
    back.
    """
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_model_len=60,
        caching=caching,
        policy=policy,
        admit_in_groups=admit_in_groups,
        groups=groups,
        num_draft_tokens=num_draft_tokens,
    )
    requests = random_requests(rng, num_requests, scheduler.max_len)
    small = patch.multiple(scheduler_module, MIN_GAINED_TOKENS=min_gained_tokens, **SMALL_LIMITS)
    with small, patch.object(free_slots, "GROUP_FRACTION", 1):
        driver, lost = run_random_workload(rng, Driver(scheduler, depth, seed), requests, num_aborts)

    for request in requests:
        if request.request_id not in lost:
            assert_as_alone(driver.answers[request.request_id], request, scheduler.max_len)
    if policy == "fcfs" and not caching and all(r.sampling_params.prompt_logprobs is None for r in requests):
        first_scheduled = list(dict.fromkeys(new.request_id for step in driver.steps for new in step.new_requests))
        assert first_scheduled == sorted(first_scheduled, key=lambda request_id: int(request_id[1:]))
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.prefix_cache_hits <= stats.prefix_cache_queries


def random_requests(rng: random.Random, count: int, max_len: int) -> list[EngineRequest]:
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(24))] for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        max_tokens = rng.choice([None, None, 0, 1, rng.randint(2, 40), rng.randint(2, 40)])
        request = make_request(
            f"r{index}", prompt, priority=rng.randrange(3), salt=rng.choice([None, None, "a"]), end_ids=[END_ID],
            stop_ids=[END_ID, *rng.sample(range(VOCAB), rng.randrange(2))], max_tokens=max_tokens,
            min_tokens=0 if max_tokens in (0, 1) else rng.choice([0, 2]), ignore_eos=False,
            prompt_logprobs=rng.choice([None, None, 0]), logprobs=rng.choice([None, 0]),
        )  # fmt: skip
        if len(prompt) < max_len:
            requests.append(request)
    return requests


def run_random_workload(
    rng: random.Random, driver: Driver, requests: list[EngineRequest], num_aborts: int
) -> tuple[Driver, set[str]]:
    """Returns the ids of the requests that were aborted or failed, too."""
    lost: set[str] = set()
    to_add = requests.copy()
    while to_add:
        for _ in range(rng.randint(0, 4)):
            if to_add:
                driver.add(to_add.pop(0))
        for _ in range(rng.randint(0, 5)):
            driver.step()
        if num_aborts > len(lost) and rng.random() < 0.5:
            request_id = rng.choice(requests).request_id
            if request_id in driver.answers and driver.answers[request_id].finish_reason is None:
                lost.add(request_id)
                if rng.random() < 0.5:
                    driver.runner.fail_on[request_id] = "Its logits are not finite."
                    driver.runner.poison.add(request_id)
                    continue
            if request_id in driver.answers:
                driver.scheduler.abort([request_id, "unknown"])
                driver.check(None)
    driver.run()
    return driver, lost


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
    requests = [
        make_request("first", [9], max_tokens=16),
        make_request("long", range(12), prompt_logprobs=prompt_logprobs, max_tokens=5),
    ]
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
        sum(count for name, count in step.num_scheduled_tokens.items() if name.startswith("asks") and count > 1)
        for step in driver.steps
    ]
    assert max(rows) == 7
    assert driver.steps[0].num_scheduled_tokens == {"asks0": 7, "plain": 30}
    for request in (*asking, plain):
        assert_as_alone(answers[request.request_id], request, 128)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_resumes_asks_no_second_time_for_what_its_prompt_brought(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROB_ROWS", 7)
    driver = Driver(make_scheduler(num_blocks=9, budget=40), depth)
    requests = [
        make_request("first", [3], max_tokens=30),
        make_request("asks", range(1, 13), prompt_logprobs=0, max_tokens=18),
    ]
    driver.add(*requests)
    answers = driver.run()
    begun, *resumed = [new for step in driver.steps for new in step.new_requests if new.request_id == "asks"]
    assert begun.sampling_params.prompt_logprobs == 0
    assert [new.sampling_params.prompt_logprobs for new in resumed if len(new.token_ids) > 12] == [None] * len(resumed)
    assert len(resumed) > 0
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 36)


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
def test_stop_conditions(
    depth: int, params: dict[str, int | None], num_tokens: int, finish_reason: str, stop_reason: str | None
) -> None:
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


def test_async_gives_a_step_before_the_last_one_is_known() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler)
    scheduler.add_request(make_request("r", [1, 2], max_tokens=3))
    steps = [scheduler.schedule() for _ in range(4)]
    assert [None if step is None else dict(step.num_scheduled_tokens) for step in steps] == [
        {"r": 2},
        {"r": 1},
        {"r": 1},
        None,
    ]
    outputs = [output for step in steps if step for output in scheduler.update(step, runner.execute(step))]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert not scheduler.has_work()


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


def test_a_cache_smaller_than_the_model_ends_a_lone_sequence_with_length(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=100)
    assert "sequences end at 12 tokens" in caplog.text
    driver = Driver(scheduler)
    driver.add(make_request("r", [1, 2, 3], max_tokens=None))
    answer = driver.run()["r"]
    assert (len(answer.tokens), answer.finish_reason) == (9, "length")
    assert scheduler.stats().num_preemptions == 0


def test_reset_prefix_cache_only_when_idle() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", range(9), max_tokens=2))
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    driver.add(make_request("b", range(9), max_tokens=2))
    assert driver.run()["b"].outputs[0].num_cached_tokens == 0


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

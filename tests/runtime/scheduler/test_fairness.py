"""Shares of API keys: what each gets while others wait, without a model."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.messages import EngineRequest, Tenant
from compile_and_serve.runtime.scheduler.fair_queue import can_start
from compile_and_serve.runtime.scheduler.fairness import PROBE_STEPS, TokenCost
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError, TenantLimitError
from tests.support.scheduler_harness import VOCAB, Driver, assert_as_alone, make_request, make_scheduler


def request_of(tenant: Tenant | str | None, name: str, num_prompt: int, num_output: int, **params: Any) -> EngineRequest:
    """Its prompt begins unlike those of others."""
    rng = random.Random(name)
    prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
    request = make_request(name, prompt, max_tokens=num_output, ignore_eos=True, salt=name, **params)
    return msgspec.structs.replace(request, tenant=Tenant(tenant) if isinstance(tenant, str) else tenant)


class Meter:
    """Counts what each key gets, in the cost of `TokenCost`, and how far it is behind the others while it waits."""

    def __init__(self, driver: Driver, tenants: dict[str, Tenant]) -> None:
        self.driver, self.tenants = driver, tenants
        self.tenant_of: dict[str, str] = {}
        self.num_computed: Counter[str] = Counter()  # of each request, without what was computed again
        self.served: Counter[str] = Counter()  # of each key, divided by its weight
        self.since: dict[str, Counter[str]] = {}  # of each key that waits, what each had when it began to
        self.behind = 0.0

    def add(self, request: EngineRequest) -> None:
        assert request.tenant is not None
        self.tenant_of[request.request_id] = request.tenant.name
        self.driver.add(request)

    def waiting(self) -> set[str]:
        scheduler = self.driver.scheduler
        return {one.share.account.tenant.name for one in scheduler._admission.waiting if can_start(one)}

    def step(self) -> None:
        scheduler = self.driver.scheduler
        known = dict(scheduler.requests)
        before = self.waiting()
        step = self.driver.step()
        if step is not None:
            for request_id in step.num_scheduled_tokens:
                request = known[request_id]
                # Its tokens up to this one, of which the runner computes those that were not in its cache.
                end = self.driver.runner.held[request_id].computed
                is_decode = end > len(request.prompt.token_ids)
                new = max(0, end - self.num_computed[request_id])
                self.num_computed[request_id] += new
                cost = new * (TokenCost.DEFAULT if is_decode else 1.0)
                name = self.tenant_of[request_id]
                self.served[name] += cost / self.tenants[name].weight  # type: ignore[assignment]
        waiting = before & self.waiting()
        self.since = {name: self.since.get(name, self.served.copy()) for name in waiting}
        active = {self.tenant_of[request_id] for request_id in scheduler.requests}
        for name, start in self.since.items():
            own = self.served[name] - start[name]
            for other in active - {name}:
                self.behind = max(self.behind, self.served[other] - start[other] - own)


@pytest.mark.exhaustive
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.sampled_from([1.0, 1.0, 2.0]), min_size=2, max_size=4),
    max_num_seqs=st.integers(2, 8),
    budget=st.sampled_from([16, 24, 32]),
    num_blocks=st.sampled_from([40, 80, 400, 400]),
    depth=st.integers(0, 2),
)
def test_a_key_that_waits_gets_its_share(
    seed: int, weights: list[float], max_num_seqs: int, budget: int, num_blocks: int, depth: int
) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, caching=rng.random() < 0.5)
    tenants = {f"key {number}": Tenant(f"key {number}", weight) for number, weight in enumerate(weights)}
    driver = Driver(scheduler, depth)
    meter = Meter(driver, tenants)
    requests: list[EngineRequest] = []
    for number in range(25):
        name = rng.choice(list(tenants))
        many = rng.choice([1, 1, 6])
        for copy in range(many):
            new = request_of(tenants[name], f"{number}.{copy}", rng.choice([1, 4, 30, 60]), rng.choice([1, 5, 30]))
            requests.append(new)
            meter.add(new)
        for _ in range(rng.choice([0, 1, 5, 20])):
            meter.step()
    while scheduler.has_work() or driver.in_flight:
        assert len(driver.steps) < 5000, "no progress"
        meter.step()
    for request in requests:
        assert_as_alone(driver.answers[request.request_id], request, scheduler.max_len)
    # The counters of keys that wait may differ by the slack (half a step's tokens: a key gives way to one that is behind by more) and by
    # what one more step adds: its tokens, of which each sequence's decode costs as much as DEFAULT. A key that begins to wait may be ahead
    # by as much, and the others catch up with it first. So what keys get while one waits differs by twice that, as in the paper: 2 U.
    # Where blocks are few there is no such bound: a key whose sequences compute again what a preemption lost gets nothing that counts.
    apart = budget / 2 + budget + max_num_seqs * (TokenCost.DEFAULT - 1)
    assert num_blocks < 400 or meter.behind <= 2 * apart


def started(driver: Driver, *, steps: int = 1) -> list[str]:
    """The requests that start in the next steps."""
    found: list[str] = []
    for _ in range(steps):
        step = driver.step()
        if step is not None:
            found += [new.request_id for new in step.new_requests]
    return found


def running(driver: Driver) -> Counter[str]:
    """How many running requests each key has."""
    return Counter(request.share.account.tenant.name for request in driver.scheduler._running)


def full_of_a(**options: Any) -> Driver:
    """A scheduler with 8 slots, all of them A's, whose other 40 requests wait."""
    driver = Driver(make_scheduler(num_blocks=800, **options))
    driver.add(*(request_of("a", f"a{number}", 4, 30) for number in range(48)))
    for _ in range(5):
        driver.step()
    assert running(driver) == {"a": 8}
    return driver


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_a_key_that_comes_later_gets_its_share_of_the_slots_at_once(depth: int) -> None:
    driver = full_of_a()
    driver.depth = depth
    driver.add(request_of("b", "b0", 4, 30))
    assert started(driver) == ["b0"]
    driver.add(*(request_of("b", f"b{number}", 4, 30) for number in range(1, 12)))
    started(driver, steps=4)
    assert running(driver) == {"a": 4, "b": 4}
    driver.run()


def test_slots_follow_weights_and_what_is_left_over_is_used() -> None:
    driver = full_of_a()
    driver.add(*(request_of(Tenant("b", weight=3.0), f"b{number}", 4, 30) for number in range(12)))
    started(driver, steps=4)
    assert running(driver) == {"a": 2, "b": 6}
    driver.add(request_of("c", "c", 4, 1))
    assert "c" in started(driver, steps=2)
    driver.run()


def test_long_prompts_of_one_key_do_not_delay_a_short_one_of_another() -> None:
    driver = Driver(make_scheduler(num_blocks=800, budget=32, max_model_len=700))
    driver.add(*(request_of("a", f"a{number}", 600, 4) for number in range(4)))
    started(driver, steps=3)
    driver.add(request_of("b", "b", 16, 4))
    step = driver.step()
    assert step is not None
    assert step.num_scheduled_tokens == {"a0": 16, "b": 16}
    assert driver.answers["b"].tokens, "its first token takes one step"


def test_while_a_key_that_is_behind_decodes_the_other_keys_prompts_leave_room() -> None:
    driver = Driver(make_scheduler(num_blocks=800, budget=32, max_model_len=700))
    driver.add(request_of("b", "b", 4, 100))
    driver.step()
    driver.add(request_of("a", "a", 600, 4))
    started(driver, steps=4)
    steps = [driver.step() for _ in range(PROBE_STEPS)]
    scheduled = [step.num_scheduled_tokens for step in steps if step is not None]
    assert scheduled.count({"b": 1}) == 1  # the time of decodes alone is measured
    assert scheduled.count({"b": 1, "a": int(TokenCost.DEFAULT)}) == PROBE_STEPS - 1
    driver.run()


def test_beside_decodes_there_are_as_many_prompt_logprobs_as_take_their_time() -> None:
    cost = TokenCost()
    assert (cost.rows_beside(0), cost.rows_beside(8)) == (64, 4)
    for _ in range(200):
        cost.observe(8, 0, 0.016)
        cost.observe(8, 100, 0.016 + 0.05)
        cost.observe(8, 10, 0.016 + 0.005 + 0.01, 10)
    assert cost.row == pytest.approx(2.0, rel=0.05)
    assert cost.rows_beside(8) == 10  # of 1.5 ms with their tokens
    assert (cost.rows_beside(1), cost.rows_beside(80)) == (4, 64)
    for _ in range(200):  # steps with prompts take 8 ms more, however few tokens they have
        cost.observe(8, 0, 0.016)
        rows = cost.rows_beside(8)
        cost.observe(8, rows, 0.016 + 0.008 + rows * 0.001, rows)
    assert cost.rows_beside(8) in (7, 8), "the step takes twice as long"


def test_a_short_prompt_does_not_wait_for_its_keys_long_ones() -> None:
    driver = Driver(make_scheduler(num_blocks=800, budget=32, max_model_len=700))
    driver.add(request_of("b", "b long", 300, 4), request_of("a", "a", 300, 4))
    driver.step()
    driver.add(request_of("b", "b short", 4, 4))
    step = driver.step()
    assert step is not None
    assert step.num_scheduled_tokens == {"b long": 12, "b short": 4, "a": 16}


def test_limits_of_a_key_hold_also_while_it_is_alone() -> None:
    driver = Driver(make_scheduler(num_blocks=800))
    tenant = Tenant("a", max_running=2, max_waiting=3)
    driver.add(*(request_of(tenant, f"a{number}", 4, 20) for number in range(5)))
    with pytest.raises(
        TenantLimitError, match="5 sequences of this API key are running or waiting, and this request adds 1; its limit is 5"
    ):
        driver.add(request_of(tenant, "one more", 4, 20))
    most = 0
    while driver.has_work():
        driver.step()
        most = max(most, running(driver)["a"])
    assert most == 2


def test_a_full_queue_keeps_no_other_key_out() -> None:
    scheduler = make_scheduler(num_blocks=800, max_waiting=8)  # 16 sequences
    for number in range(16):
        scheduler.add_request(request_of("a", f"a{number}", 4, 20))
    with pytest.raises(QueueFullError, match="16 sequences are running or waiting, and this request adds 1; the limit is 16"):
        scheduler.add_request(request_of("a", "one more", 4, 20))
    for number in range(8):
        scheduler.add_request(request_of("b", f"b{number}", 4, 20))
    for name in ("a", "b"):
        with pytest.raises(QueueFullError, match="24 sequences"):
            scheduler.add_request(request_of(name, "one more", 4, 20))


def test_users_share_what_their_key_gets() -> None:
    driver = Driver(make_scheduler(num_blocks=800))
    for user in ("x", "y", "z"):
        driver.add(*(request_of(Tenant("a", user=user), f"{user}{number}", 4, 10) for number in range(20)))
    driver.add(*(request_of("b", f"b{number}", 4, 10) for number in range(60)))
    meter = Counter[str]()
    for _ in range(60):
        step = driver.step()
        assert step is not None
        for request_id, count in step.num_scheduled_tokens.items():
            meter[request_id[0]] += count
    assert meter["b"] == pytest.approx(meter["x"] + meter["y"] + meter["z"], rel=0.1)
    assert meter["x"] == pytest.approx(meter["y"], rel=0.25)
    assert meter["y"] == pytest.approx(meter["z"], rel=0.25)


def test_a_later_request_of_a_key_that_is_behind_is_not_preempted() -> None:
    driver = Driver(make_scheduler(num_blocks=40, caching=False))
    driver.add(*(request_of("a", f"a{number}", 20, 40) for number in range(4)))
    started(driver, steps=6)
    driver.add(request_of("b", "b", 4, 40))  # the last in the order of arrival
    lost = []
    while "b" not in _ended(driver):
        before = {request.request_id for request in driver.scheduler._running}
        driver.step()
        lost += sorted(before - {request.request_id for request in driver.scheduler._running} - _ended(driver))
    assert lost
    assert "b" not in lost
    driver.run()


def _ended(driver: Driver) -> set[str]:
    return {name for name, answer in driver.answers.items() if answer.finish_reason is not None}


def test_sequences_whose_masks_take_long_sit_out_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    driver = Driver(make_scheduler(num_blocks=800))
    driver.add(request_of("a", "a0", 4, 100), request_of("a", "a1", 4, 100))
    driver.step()

    def step(masks: dict[str, float]) -> set[str]:
        scheduled = driver.scheduler.schedule()
        assert scheduled is not None
        result = driver.runner.execute(scheduled)
        result.mask_seconds = masks
        for output in driver.scheduler.update(scheduled, result):
            driver.take(output)
        return set(scheduled.num_scheduled_tokens)

    assert step({"a0": 0.02, "a1": 0.02}) == {"a0", "a1"}
    assert step({}) == {"a0", "a1"}, "one key alone"
    driver.add(request_of("b", "b", 4, 100))
    assert step({"a0": 0.02, "a1": 0.02}) == {"a0", "a1", "b"}
    assert step({}) == {"b"}
    now += 0.081
    assert step({}) == {"b", "a0"}, "they come back one after the other"
    now += 0.08
    assert step({}) == {"b", "a0", "a1"}
    driver.run()


def test_sequences_that_all_sit_out_keep_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    driver = Driver(make_scheduler(num_blocks=800))
    scheduler, names = driver.scheduler, {"a0", "a1", "b0", "b1"}
    driver.add(*(request_of(name[0], name, 4, 100) for name in sorted(names)))
    for masks in ({}, dict.fromkeys(names, 0.02)):
        scheduled = scheduler.schedule()
        assert scheduled is not None
        result = driver.runner.execute(scheduled)
        result.mask_seconds = masks
        scheduler.update(scheduled, result)
    assert scheduler.schedule() is None
    assert scheduler.stats().num_preemptions == 0
    now += 0.17
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert scheduled.num_scheduled_tokens == dict.fromkeys(sorted(names), 1)


def test_what_is_prepared_in_vain_never_starts() -> None:
    driver = Driver(make_scheduler())
    grammar: Future[Any] = Future()
    request = request_of(None, "wrong", 4, 4)
    driver.scheduler.add_request(request, {grammar: "grammar"})
    grammar.set_exception(ValueError("It is wrong."))
    assert driver.scheduler.schedule() is None
    driver.scheduler.abort(["wrong"])
    assert not driver.scheduler.has_work()


def test_one_key_alone_is_scheduled_as_requests_without_a_key() -> None:
    def steps(tenant: str | None) -> list[dict[str, int]]:
        driver = Driver(make_scheduler(num_blocks=60, budget=24))
        rng = random.Random(1)
        for number in range(30):
            driver.add(request_of(tenant, f"r{number}", rng.randint(1, 40), rng.randint(1, 30)))
            driver.step()
        driver.run()
        return [step.num_scheduled_tokens for step in driver.steps]

    assert steps("a") == steps(None)


def test_what_a_decode_costs_is_measured() -> None:
    cost = TokenCost()
    for _ in range(200):
        cost.observe(8, 0, 0.008)
        cost.observe(8, 1000, 0.008 + 0.25)
    assert cost.decode == pytest.approx(4.0, rel=0.05)
    for _ in range(200):
        cost.observe(1, 0, 1.0)
    assert cost.decode == TokenCost.LIMITS[1]

"""How much time prompts and costly decodes of one key may take from another's decodes, on a made-up device, without a model."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from compile_and_serve.runtime.messages import EngineRequest, Tenant
from compile_and_serve.runtime.scheduler.fairness import Fairness
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput
from compile_and_serve.runtime.scheduler.step_time import PROBE_STEPS, StepTime
from tests.runtime.scheduler.test_drafts import three_drafts
from tests.support.scheduler_harness import VOCAB, Driver, assert_as_alone, make_request, make_scheduler

DECODES = 0.002  # seconds of a step
PROMPTS = 0.003  # of prompts in a step, however few, besides
TOKEN = 0.00001  # of a prompt token


@dataclass
class Load:
    """One key's requests, always the same number at once. extra: seconds by which its decodes make a step longer; then they want
    log-probabilities. of_decode: seconds by which each of them does, and each prompt token.
    """

    num_requests: int
    num_prompt: int
    num_output: int
    weight: float = 1.0
    extra: float = 0.0
    of_decode: float = 0.0


class Engine:
    """Serves loads for a time that it makes up. is_host_bound: the host needs the time of a step, while the step before runs.
    is_random: outputs have all lengths up to that of their load.
    """

    def __init__(self, loads: dict[str, Load], *, depth: int = 0, is_host_bound: bool = False, is_random: bool = False) -> None:
        self.scheduler = make_scheduler(num_blocks=8000, max_num_seqs=8, budget=256, max_model_len=2048)
        self.loads, self.depth, self.is_host_bound, self.is_random = loads, depth, is_host_bound, is_random
        self.in_flight: deque[SchedulerOutput] = deque()
        self.now, self.number = 0.0, 0
        self.tokens: Counter[str] = Counter()
        self.num_started: Counter[str] = Counter()
        self.longest: dict[str, float] = {}  # seconds between two of a key's tokens
        self.rng = random.Random(0)
        for key, load in loads.items():
            for _ in range(load.num_requests):
                self.add(key)

    def add(self, key: str) -> None:
        load, self.number = self.loads[key], self.number + 1
        prompt = [self.rng.randrange(VOCAB) for _ in range(load.num_prompt)]
        num_output = load.num_output if not self.is_random else self.rng.randint(1, load.num_output)
        logprobs = 5 if load.extra else None
        name = f"{key} {self.number}"
        request = make_request(name, prompt, max_tokens=num_output, ignore_eos=True, salt=str(self.number), logprobs=logprobs)
        self.scheduler.add_request(with_tenant(request, Tenant(key, weight=load.weight)))

    def seconds_of(self, step: SchedulerOutput) -> float:
        num_prompt = step.total_num_scheduled_tokens - step.num_decodes
        new = {request.request_id for request in step.new_requests}
        decodes = Counter(name.split()[0] for name, count in step.num_scheduled_tokens.items() if count == 1 and name not in new)
        extra = sum(self.loads[key].extra + count * self.loads[key].of_decode for key, count in decodes.items())
        token = max(TOKEN, *(load.of_decode for load in self.loads.values()))
        return DECODES + extra + (PROMPTS + token * num_prompt if num_prompt else 0.0)

    def run(self, seconds: float) -> None:
        self.tokens.clear()
        self.num_started.clear()
        end, last = self.now + seconds, dict.fromkeys(self.loads, self.now)
        while self.now < end:
            while len(self.in_flight) <= self.depth and (step := self.scheduler.schedule()) is not None:
                self.in_flight.append(step)
                self.num_started.update(new.request_id.split()[0] for new in step.new_requests)
            step = self.in_flight.popleft()
            timed = self.in_flight[0] if self.is_host_bound and self.in_flight else step
            took = self.seconds_of(timed)
            self.now += took
            sampled = {request.request_id: [1] for request in self.scheduler._in_flight[0].sampling()}
            result = ModelRunnerOutput(step=step.step, sampled_token_ids=sampled, logprobs={}, prompt_logprobs={}, errors={})
            for output in self.scheduler.update(step, result, took):
                key = output.request_id.split()[0]
                self.tokens[key] += len(output.new_token_ids)
                self.longest[key] = max(self.longest.get(key, 0.0), self.now - last[key])
                last[key] = self.now
                if output.finish_reason is not None:
                    self.add(key)


def with_tenant(request: EngineRequest, tenant: Tenant) -> EngineRequest:
    return msgspec.structs.replace(request, tenant=tenant)


STEADY = Load(4, 12, 1900)


@pytest.mark.parametrize(("depth", "is_host_bound"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("attack", [Load(128, 6, 1), Load(4, 600, 2)], ids=["requests of one token", "long prompts"])
def test_prompts_of_one_key_take_little_from_decodes_of_another(attack: Load, depth: int, is_host_bound: bool) -> None:
    engine = Engine({"b": STEADY, "a": attack}, depth=depth, is_host_bound=is_host_bound)
    engine.run(1.0)
    engine.longest.clear()
    engine.run(2.0)
    alone = 4 / DECODES * 2.0
    assert engine.tokens["b"] > 0.62 * alone
    assert engine.num_started["a"] > 10, "and it is served"
    assert engine.longest["b"] < 4 * DECODES + PROMPTS


def test_a_key_of_more_weight_may_take_more_time() -> None:
    tokens = []
    for weight in (1.0, 4.0):
        engine = Engine({"b": STEADY, "a": Load(128, 6, 1, weight)})
        engine.run(2.0)
        tokens.append(engine.tokens["a"])
    assert tokens[1] > 2 * tokens[0]


@pytest.mark.parametrize("num_output", [1, 4, 30])
def test_keys_that_do_the_same_do_not_wait_for_each_other(num_output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(observe: Callable[..., dict[str, float]] | None) -> Counter[str]:
        load = Load(4, 12, num_output)
        engine = Engine({"b": load, "a": load})
        if observe is not None:
            monkeypatch.setattr(engine.scheduler._admission.fairness.step_time, "observe", observe)
        engine.run(1.0)
        return engine.tokens

    with_accounts, without = tokens(None), tokens(lambda *_: {})
    for key in ("a", "b"):
        assert with_accounts[key] > 0.95 * without[key]


def test_one_key_alone_never_waits() -> None:
    engine = Engine({"a": Load(12, 6, 2)})
    engine.run(1.0)
    assert engine.scheduler._admission.fairness.step_time.without("a") == 0.0
    assert engine.tokens["a"] > 0.9 * 8 * 1.0 / (DECODES + PROMPTS)


def test_a_long_pause_does_not_keep_prompts_waiting_for_long() -> None:
    engine = Engine({"b": STEADY, "a": Load(8, 6, 1)})
    engine.run(1.0)
    times = iter([3.0])
    seconds_of = engine.seconds_of
    engine.seconds_of = lambda step: next(times, seconds_of(step)) if step.new_requests else seconds_of(step)  # type: ignore[method-assign]
    engine.run(3.0)  # the pause
    engine.run(PROBE_STEPS * DECODES)
    assert engine.num_started["a"]


def costly(factor: float, *, num_output: int = 1900, num_requests: int = 4) -> Load:
    """Whose decodes make a step so many times longer."""
    return Load(num_requests, 12, num_output, extra=factor * DECODES)


@pytest.mark.parametrize(("depth", "is_host_bound"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("factor", [pytest.param(2.0, marks=pytest.mark.slow), 10.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_costly_decodes_of_one_key_take_little_from_those_of_another(factor: float, depth: int, is_host_bound: bool) -> None:
    engine = Engine({"b": STEADY, "a": costly(factor)}, depth=depth, is_host_bound=is_host_bound)
    engine.run(1.0)
    engine.longest.clear()
    engine.run(2.0)
    alone = 4 / DECODES * 2.0
    assert engine.tokens["b"] > 0.6 * alone
    assert engine.tokens["a"] * (1 + factor) > 0.2 * alone, "and it gets its part of the time"
    assert engine.longest["b"] < (2 + factor) * DECODES, "a step, not several in a row"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_with_requests_of_any_length_a_key_keeps_its_half_of_the_time(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    a = costly(rng.choice([3.0, 10.0]), num_output=rng.choice([2, 10, 60]), num_requests=rng.choice([1, 4, 32]))
    b = Load(rng.choice([2, 4]), 12, rng.choice([30, 200]))

    def tokens(loads: dict[str, Load]) -> Counter[str]:
        engine = Engine(loads, depth=depth, is_random=True)
        engine.run(0.5)
        engine.run(1.5)
        return engine.tokens

    beside_itself, beside_a = tokens({"b": b, "a": b}), tokens({"b": b, "a": a})
    assert beside_a["b"] > 0.5 * tokens({"b": b})["b"]
    assert beside_a["b"] > 0.65 * beside_itself["b"]
    assert beside_a["a"] > 0


def test_a_pause_in_the_first_step_without_them_does_not_hide_what_they_cost() -> None:
    engine = Engine({"b": STEADY, "a": costly(10.0)})
    pauses = iter([1.0])
    seconds_of = engine.seconds_of

    def with_a_pause(step: SchedulerOutput) -> float:
        is_without = step.num_decodes and not any(name.startswith("a") for name in step.num_scheduled_tokens)
        return next(pauses, seconds_of(step)) if is_without else seconds_of(step)

    engine.seconds_of = with_a_pause  # type: ignore[method-assign]
    engine.run(2.0)
    assert not list(pauses)
    engine.run(1.0)
    assert engine.tokens["b"] > 0.55 * 4 / DECODES


@pytest.mark.parametrize("extra", [0.1, 10.0])
def test_keys_with_the_same_costly_decodes_do_not_sit_out(extra: float) -> None:
    engine = Engine({"b": costly(extra), "a": costly(extra)})
    engine.run(1.0)
    engine.run(2.0)
    for key in ("a", "b"):
        assert engine.tokens[key] > 0.93 * 4 / (DECODES * (1 + 2 * extra)) * 2.0


def test_decodes_that_cost_little_more_sit_out_hardly_ever() -> None:
    engine = Engine({"b": STEADY, "a": costly(0.2)})
    engine.run(1.0)
    assert engine.tokens["a"] > 0.95 * engine.tokens["b"]


def test_where_each_decode_takes_time_a_key_whose_decodes_cost_little_more_keeps_its_share() -> None:
    each = DECODES / 2
    engine = Engine({"b": Load(4, 12, 40, of_decode=each), "a": Load(4, 12, 1900, extra=0.1 * each, of_decode=each)}, is_random=True)
    engine.run(2.0)
    engine.run(2.0)
    assert engine.tokens["a"] > 0.8 * engine.tokens["b"]


def test_costly_decodes_do_not_sit_out_once_no_other_key_decodes() -> None:
    engine = Engine({"b": STEADY, "a": costly(20.0)})
    engine.run(1.0)
    scheduler = engine.scheduler
    assert scheduler._admission.fairness.step_time.is_overdrawn("a")
    scheduler.abort([name for name in scheduler.requests if name.startswith("b")])
    engine.run(1.0)
    assert engine.tokens["a"] > 0.95 * 4 / (21 * DECODES)


def test_one_key_with_costly_decodes_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Fairness, "left_out"), (StepTime, "observe")):
        monkeypatch.delattr(owner, name)
    engine = Engine({"a": costly(10.0)})
    engine.run(1.0)
    assert engine.tokens["a"] > 0.95 * 4 / (11 * DECODES)


@pytest.mark.parametrize("seed", range(6))
def test_sequences_that_sit_out_go_on_with_what_they_have(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks are few, steps are in flight and decodes have drafts."""
    rng = random.Random(seed)
    monkeypatch.setattr(StepTime, "may_hold", True)
    monkeypatch.setattr(StepTime, "is_overdrawn", lambda self, key: key == "a" and rng.random() < 0.6)
    speculator = three_drafts(monkeypatch) if seed % 2 else None
    scheduler = make_scheduler(num_blocks=rng.choice([40, 200]), speculator=speculator, drafts_run_ahead=seed % 4 == 3)
    driver = Driver(scheduler, depth=seed % 3, seed=seed)
    requests = []
    for number in range(30):
        key = rng.choice("ab")
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([2, 20]))]
        logprobs = 5 if key == "a" and number % 3 else None
        request = make_request(f"{key}{number}", prompt, max_tokens=rng.choice([1, 20, 40]), ignore_eos=True, logprobs=logprobs)
        requests.append(with_tenant(request, Tenant(key)))
        driver.add(requests[-1])
        for _ in range(rng.randrange(4)):
            driver.step()
    answers = driver.run()
    for request in requests:
        assert_as_alone(answers[request.request_id], request, scheduler.max_len)

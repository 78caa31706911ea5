"""How much time prompts of one key may take from another's decodes, on a made-up device, without a model."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from compile_and_serve.runtime.messages import EngineRequest, Tenant
from compile_and_serve.runtime.scheduler.prompt_time import PROBE_STEPS
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput
from tests.support.scheduler_harness import VOCAB, make_request, make_scheduler

DECODES = 0.002  # seconds of a step
PROMPTS = 0.003  # of prompts in a step, however few, besides
TOKEN = 0.00001  # of a prompt token


@dataclass
class Load:
    """One key's requests, always the same number at once."""

    num_requests: int
    num_prompt: int
    num_output: int
    weight: float = 1.0


class Engine:
    """Serves loads for a time that it makes up. is_host_bound: the host needs the time of a step, while the step before runs."""

    def __init__(self, loads: dict[str, Load], *, depth: int = 0, is_host_bound: bool = False) -> None:
        self.scheduler = make_scheduler(num_blocks=8000, max_num_seqs=8, budget=256, max_model_len=2048)
        self.loads, self.depth, self.is_host_bound = loads, depth, is_host_bound
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
        request = make_request(f"{key} {self.number}", prompt, max_tokens=load.num_output, ignore_eos=True, salt=str(self.number))
        self.scheduler.add_request(with_tenant(request, Tenant(key, weight=load.weight)))

    def seconds_of(self, step: SchedulerOutput) -> float:
        num_prompt = step.total_num_scheduled_tokens - step.num_decodes
        return DECODES + (PROMPTS + TOKEN * num_prompt if num_prompt else 0.0)

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
            monkeypatch.setattr(engine.scheduler._admission.fairness.prompt_time, "observe", observe)
        engine.run(1.0)
        return engine.tokens

    with_accounts, without = tokens(None), tokens(lambda *_: {})
    for key in ("a", "b"):
        assert with_accounts[key] > 0.95 * without[key]


def test_one_key_alone_never_waits() -> None:
    engine = Engine({"a": Load(12, 6, 2)})
    engine.run(1.0)
    fairness = engine.scheduler._admission.fairness
    assert fairness.prompt_time.plain == 0.0
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

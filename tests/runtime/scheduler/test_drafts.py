"""Decodes of several tokens."""

import random

import pytest

from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.speculative_config import SpeculativeConfig
from tests.support.drafters import check_every_draft
from tests.support.scheduler_harness import Driver, assert_as_alone, expected_answer, make_request, make_scheduler


def three_drafts(monkeypatch: pytest.MonkeyPatch, max_rows: int = 32) -> Speculator:
    """Three of each decode, all of which are checked."""
    check_every_draft(monkeypatch)
    config = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=3)
    return Speculator(config, max_rows=max_rows, is_asynchronous=True)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_drafts_end_at_the_length_limit_and_at_stop_tokens(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 9, 2, 31]
    free_run = expected_answer(make_request("r", prompt, max_tokens=12), 64).tokens
    requests = [make_request(f"length{count}", prompt, max_tokens=count) for count in range(13)]
    requests += [make_request(f"stop{i}", prompt, stop_ids=[free_run[i]], max_tokens=12, logprobs=0) for i in range(12)]
    requests += [make_request("min", prompt, end_ids=free_run, max_tokens=12, min_tokens=6)]
    speculator = three_drafts(monkeypatch, max_rows=256)
    driver = Driver(make_scheduler(max_model_len=64, max_num_seqs=32, budget=256, num_blocks=400, speculator=speculator), depth)
    driver.add(*requests)
    answers = driver.run()
    for request in requests:
        answer = answers[request.request_id]
        assert_as_alone(answer, request, 64)
        if request.sampling_params.logprobs is not None:
            logprobs = [entry.ids[0] for output in answer.outputs for entry in output.new_logprobs or []]
            assert logprobs == answer.tokens


def test_accepted_drafts_save_steps_and_rejected_ones_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accepts(random.Random):
        def randint(self, a: int, b: int) -> int:
            return a if self.is_pessimist else b

    for is_pessimist, num_steps in [(False, 1 + 3), (True, 1 + 12)]:
        driver = Driver(make_scheduler(speculator=three_drafts(monkeypatch)), depth=0)
        driver.runner.rng = Accepts(0)
        driver.runner.rng.is_pessimist = is_pessimist  # type: ignore[attr-defined]
        request = make_request("r", [1, 2, 3], max_tokens=13)
        driver.add(request)
        assert_as_alone(driver.run()["r"], request, 128)
        assert len(driver.steps) == num_steps


def test_only_decodes_that_take_drafts_wait_for_the_step_in_flight() -> None:
    speculators = [
        Speculator(SpeculativeConfig(method="ngram", num_speculative_tokens=3), max_rows=32, is_asynchronous=False) for _ in range(3)
    ]
    for speculator, flags in zip(speculators, [(False, False), (True, False), (True, True)], strict=True):
        driver = Driver(make_scheduler(speculator=speculator), depth=0)
        driver.add(*(make_request(f"r{i}", [1, 2, 3], speculate=flag) for i, flag in enumerate(flags)))
        driver.step()  # the prompts
        assert driver.scheduler.schedule() is not None
        assert (driver.scheduler.schedule() is None) == any(flags)


def ahead(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> Driver:
    """Whose steps run ahead of those with drafts, three of each decode."""
    return Driver(make_scheduler(speculator=three_drafts(monkeypatch), drafts_run_ahead=True, num_blocks=num_blocks), depth=1)


@pytest.mark.parametrize("seed", range(8))
def test_all_steps_but_the_first_run_ahead_while_requests_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a request may have come to its end."""
    driver, rng = ahead(monkeypatch, num_blocks=64), random.Random(seed)
    # At the end of 23 tokens its block has room for another one.
    requests = [make_request(f"r{i}", [i, 2, 3], max_tokens=20 + 4 * rng.randrange(4)) for i in range(4)]
    requests.append(make_request("last", [9, 2, 3], max_tokens=100))
    driver.add(*requests)
    answers = driver.run()
    for request in requests:
        assert_as_alone(answers[request.request_id], request, 128)
    drafted = [step for step in driver.steps if step.drafts and len(step.num_scheduled_tokens) > 1]
    assert len(drafted) > 5
    assert [step.is_ahead for step in drafted] == [False] + [True] * (len(drafted) - 1)


def test_no_request_is_preempted_for_one_that_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes 24 tokens, which fill its blocks, and the other one's blocks are all the rest."""
    driver = ahead(monkeypatch, num_blocks=6 + 7)
    monkeypatch.setattr(driver.runner.rng, "randint", lambda least, most: most)  # all drafts are accepted
    driver.add(make_request("ends", [1, 2, 3, 4], max_tokens=21), make_request("goes on", [5, 6, 7, 8], max_tokens=40))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0

"""Unfinished requests go from one scheduler to another one, and give the tokens that they would have given."""

from __future__ import annotations

import pytest

from compile_and_serve.runtime.messages import Tenant
from compile_and_serve.runtime.scheduler.move_requests import adopt, take_all
from tests.support.scheduler_harness import Driver, assert_as_alone, make_request, make_scheduler


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_requests_go_on_in_another_scheduler(num_steps: int, depth: int) -> None:
    """Some run, some wait, of several keys, with steps in flight; and the other scheduler has requests already."""
    old, new = Driver(make_scheduler(max_num_seqs=3), depth), Driver(make_scheduler(num_blocks=40), depth)
    requests = [make_request(f"r{i}", range(3 + 5 * i), max_tokens=6 + i, prompt_logprobs=1 if i == 2 else None) for i in range(6)]
    for number, one in enumerate(requests):
        one.tenant = Tenant(f"key {number % 2}", user="u" if number else None)
    old.add(*requests)
    own = make_request("own", range(9))
    new.add(own)
    new.step()
    for _ in range(num_steps):
        old.step()
    taken = take_all(old.scheduler)
    assert not old.scheduler.has_work()
    assert old.scheduler.manager.pool.num_free == old.scheduler.manager.pool.num_blocks
    assert {request.request_id for request, _ in taken} == {
        one.request_id for one in requests if not old.answers[one.request_id].finish_reason
    }
    new.answers |= {name: answer for name, answer in old.answers.items() if not answer.finish_reason}
    for request, tenant in taken:
        assert adopt(new.scheduler, request, tenant) is None
    answers = old.answers | new.run()
    for one in (*requests, own):
        assert_as_alone(answers[one.request_id], one, new.scheduler.max_len)


def test_a_request_that_is_too_long_for_the_other_cache_ends() -> None:
    old, small = Driver(make_scheduler()), Driver(make_scheduler(num_blocks=8))
    old.add(make_request("long", range(40)), make_request("short", range(20), max_tokens=100))
    old.step()
    outputs = [adopt(small.scheduler, request, tenant) for request, tenant in take_all(old.scheduler)]
    assert [output and output.error for output in outputs] == [
        "The request has 40 tokens; since ranks have joined or left, the cache holds 32.",
        None,
    ]
    small.answers["short"] = old.answers["short"]
    assert len(small.run()["short"].tokens) == 12

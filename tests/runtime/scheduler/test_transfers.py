"""Loads and stores of blocks by a connector."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.connector.handover.index import HandoverIndex
from compile_and_serve.runtime.connector.handover.params import OWN, OwnParams
from compile_and_serve.runtime.kv_config import KVTransferConfig
from compile_and_serve.runtime.messages import RequestOutput, Sibling
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, StateGroupInfo
from tests.support.fake_connector import Active, FakeStore, TransferDriver
from tests.support.scheduler_harness import Driver, assert_as_alone, make_request, make_scheduler
from tests.support.scheduler_workloads import TOKENS, WORKLOADS, check_workload, slots

FULL = StateGroupInfo("tokens", 4)
WINDOW = StateGroupInfo("tokens", 2, 6)
SLOT = StateGroupInfo("slot", 4, pages_per_slot=2, snapshots=True)
PROMPT = [i % 17 for i in range(30)]


def drop_what_is_cached(driver: Driver) -> None:
    """On the device alone."""
    driver.scheduler.manager.reset_prefix_cache()


def reset(driver: Driver) -> None:
    assert driver.scheduler.reset_prefix_cache()


def sleep(driver: Driver) -> None:
    assert isinstance(driver, TransferDriver)
    driver.sleep()


@pytest.mark.slow
@example(  # a prefill takes up what a failed one computed, and both let go of it behind their windows before that is known
    groups=[StateGroupInfo("tokens", 2, 9)],
    num_blocks=18,
    chance=0.1,
    answers_cancels=0.7,
    waits_for_stores=False,
    between_rounds=[drop_what_is_cached],
    seed=47076,
    num_requests=11,
    num_draft_tokens=0,
    max_num_seqs=5,
    budget=10,
    depth=3,
    policy="priority",
    num_aborts=2,
    admit_in_groups=False,
    min_gained_tokens=5,
)
@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.one_of(TOKENS, slots(st.just(True))), min_size=1, max_size=3),
    num_blocks=st.integers(16, 60),
    chance=st.sampled_from([0.1, 0.5, 1.0]),
    answers_cancels=st.sampled_from([0.0, 0.7, 1.0]),
    waits_for_stores=st.booleans(),
    between_rounds=st.lists(st.sampled_from([drop_what_is_cached, reset, sleep]), max_size=2),
    **WORKLOADS,
)
def test_random_workloads_with_a_connector(
    groups: list[StateGroupInfo],
    num_blocks: int,
    chance: float,
    answers_cancels: float,
    waits_for_stores: bool,
    between_rounds: list[Callable[[Driver], None]],
    **workload: Any,
) -> None:
    """Whenever loads and stores end, fail or do not come back: no block is handed out, read or written too early, and every request ends
    with its tokens.
    """
    store = FakeStore(random.Random(workload["seed"]), chance)

    def connected(scheduler: Scheduler, depth: int, seed: int) -> Driver:
        driver = TransferDriver(scheduler, store, depth, seed, answers_cancels)
        driver.waits_for_stores = waits_for_stores
        return driver

    driver = check_workload(groups, num_blocks, True, connected=connected, connector=store, between_rounds=between_rounds, **workload)
    assert not driver.stuck or answers_cancels < 1.0
    driver.waits_for_stores = True  # type: ignore[attr-defined]
    driver.run()


class Fixed(random.Random):
    """Every transfer ends after two steps, as `kind` says."""

    kind = "ends"

    def choices(self, *args: Any, **kwargs: Any) -> list[str]:  # type: ignore[override]
        return [self.kind]

    def randint(self, a: int, b: int) -> int:
        return 2


def make_driver(*groups: StateGroupInfo, depth: int = 0, answers_cancels: float = 1.0, **options: int) -> TransferDriver:
    store = FakeStore(random.Random(0), 1.0)
    scheduler = make_scheduler(**{"num_blocks": 200} | options, groups=groups or [FULL], connector=store)  # type: ignore[arg-type]
    driver = TransferDriver(scheduler, store, depth, 0, answers_cancels)
    driver.transfers.chance = Fixed()
    return driver


def run(driver: TransferDriver, request_id: str, prompt: list[int], max_tokens: int = 3) -> int:
    """Run a request alone; → how many tokens it found."""
    driver.add(request := make_request(request_id, prompt, max_tokens=max_tokens))
    assert_as_alone(driver.run()[request_id], request, driver.scheduler.max_len)
    return driver.answers[request_id].outputs[0].num_cached_tokens


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW], [SLOT, FULL], [WINDOW, SLOT]])
def test_what_a_request_leaves_is_loaded_when_the_device_has_lost_it(groups: list[StateGroupInfo], depth: int) -> None:
    driver = make_driver(*groups, depth=depth)
    assert run(driver, "a", PROMPT) == 0
    drop_what_is_cached(driver)
    # Of a window, only what a longer prompt needs is left at the end.
    assert run(driver, "b", PROMPT[:29]) == (0 if WINDOW in groups else 28)
    sleep(driver)
    assert run(driver, "c", PROMPT) == 28
    assert driver.transfers.num_ended["load finished"] >= len(groups)


def test_blocks_are_lent_while_the_next_step_runs() -> None:
    """The other engine may ask for them as soon as the request's last output is there."""
    giver = HandoverIndex(KVTransferConfig(engine_id="giver"), 0, 1)
    scheduler = make_scheduler(num_blocks=200, groups=[FULL], budget=16, connector=giver)
    give = {"do_remote_decode": True, OWN: msgspec.to_builtins(OwnParams(fingerprint="", prompt=""))}
    for name, count in (("first", 12), ("second", 20)):
        request = make_request(name, PROMPT[:count] if name == "first" else PROMPT[9 : 9 + count])
        scheduler.add_request(msgspec.structs.replace(request, kv_transfer=give))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert [step and step.num_scheduled_tokens for step in steps] == [{"first": 12, "second": 4}, {"second": 16}]
    assert scheduler.schedule() is None
    [output] = finish(scheduler, steps[0], {"first": [1]})
    assert output.kv_transfer is not None
    orders = scheduler.schedule()
    assert orders is not None
    assert orders.transfers is not None
    assert (orders.num_scheduled_tokens, [len(one.keys) for one in orders.transfers.stores]) == ({}, [3])
    assert scheduler.schedule() is None
    finish(scheduler, steps[1], {"second": [1]})
    finish(scheduler, orders, {})
    giver.close()


def test_blocks_that_there_was_no_room_to_lend_early_are_lent_with_the_next_ones() -> None:
    giver = HandoverIndex(KVTransferConfig(engine_id="giver"), 0, 1)
    scheduler = make_scheduler(num_blocks=200, groups=[FULL], budget=16, connector=giver)
    give = {"do_remote_decode": True, OWN: msgspec.to_builtins(OwnParams(fingerprint="", prompt="", early="early"))}
    scheduler.add_request(msgspec.structs.replace(make_request("long", list(range(1, 41))), kv_transfer=give))
    lent = []
    for num_promised in (1000, 0):  # blocks that other prefills need
        step = scheduler.schedule()
        promised, scheduler.manager.num_promised = scheduler.manager.num_promised, scheduler.manager.num_promised + num_promised
        assert finish(scheduler, step, {}) == []
        scheduler.manager.num_promised = promised
        assert scheduler._transfers is not None
        lent.append([len(one.keys) for one in scheduler._transfers._new.stores])
    assert lent == [[], [8]]
    giver.close()


def finish(scheduler: Scheduler, step: SchedulerOutput | None, tokens: dict[str, list[int]]) -> list[RequestOutput]:
    assert step is not None
    return scheduler.update(step, ModelRunnerOutput(step=step.step, sampled_token_ids=tokens, logprobs={}, prompt_logprobs={}, errors={}))


def test_only_what_the_device_lacks_is_loaded() -> None:
    driver = make_driver()
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    driver.transfers.store.chance = 0.0
    kept = driver.transfers.store.stored
    driver.transfers.store.stored = {}
    assert run(driver, "b", PROMPT[:14]) == 0
    driver.transfers.store.stored = kept
    assert run(driver, "c", PROMPT) == 28
    [load] = [load for step in driver.steps if step.transfers for load in step.transfers.loads]
    assert len(load.block_ids) == 4


@pytest.mark.parametrize("kind, answers_cancels", [("fails", 1.0), ("never", 1.0), ("never", 0.0)])
def test_a_request_computes_what_could_not_be_loaded(kind: str, answers_cancels: float) -> None:
    driver = make_driver(answers_cancels=answers_cancels)
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    driver.transfers.chance.kind = kind  # type: ignore[attr-defined]
    assert run(driver, "b", PROMPT) == 0
    assert driver.num_kept == (0 if answers_cancels else 7)
    if kind == "never":
        assert any(step.transfers is not None and step.transfers.cancelled for step in driver.steps)


def test_other_requests_run_while_blocks_are_loaded() -> None:
    driver = make_driver()
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    driver.add(make_request("loads", PROMPT), make_request("other", [1, 2, 3], max_tokens=1))
    driver.step()
    assert driver.answers["other"].tokens
    assert not driver.scheduler._running
    driver.run()
    assert driver.answers["loads"].outputs[0].num_cached_tokens == 28


def test_siblings_wait_for_one_load() -> None:
    driver = make_driver()
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    request = msgspec.structs.replace(make_request("b", PROMPT, max_tokens=2), siblings=[Sibling("c"), Sibling("d")])
    driver.add(request, make_request("e", [*PROMPT, 5, 6], max_tokens=2))
    for name, answer in driver.run().items():
        assert name == "a" or answer.outputs[0].num_cached_tokens == 28
    assert driver.transfers.num_ended["load finished"] == 1


def test_a_request_may_be_aborted_while_its_blocks_are_loaded() -> None:
    driver = make_driver()
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    driver.add(make_request("b", PROMPT))
    driver.step()
    driver.scheduler.abort(["b"])
    driver.check(None)
    assert driver.scheduler.has_work()
    driver.run()
    assert run(driver, "c", PROMPT) == 28
    assert driver.transfers.num_ended["load finished"] == 1


def test_what_is_loaded_during_a_reset_is_not_used() -> None:
    driver = make_driver()
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    driver.add(make_request("b", PROMPT))
    driver.step()
    assert driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.answers["b"].outputs[0].num_cached_tokens == 0
    assert driver.transfers.store.num_resets == 1


def test_evicted_content_is_stored_before_its_block_is_handed_out() -> None:
    driver = make_driver(num_blocks=80)
    driver.transfers.store.finished = lambda *_: ()  # type: ignore[method-assign]
    run(driver, "a", PROMPT)
    for number in range(14):
        run(driver, f"b{number}", [number + 20] * 30)
    assert driver.transfers.num_ended["store finished"] > 0
    num_before = driver.runner.num_prefilled
    assert run(driver, "c", PROMPT) == 28
    assert driver.runner.num_prefilled == num_before + 2


def test_a_request_ends_with_an_error_where_transfers_that_do_not_end_keep_all_blocks() -> None:
    driver = make_driver(num_blocks=12, max_model_len=40, budget=8, answers_cancels=0.0)
    run(driver, "a", PROMPT, max_tokens=1)
    pool = driver.scheduler.manager.pool
    drop_what_is_cached(driver)
    driver.transfers.chance.kind = "never"  # type: ignore[attr-defined]
    driver.add(make_request("b", PROMPT, max_tokens=2))
    driver.run()
    assert driver.stuck == {"b"}
    assert pool.num_pinned == 7
    assert run(driver, "short", [5] * 6) == 0
    driver.sleep()
    assert run(driver, "again", [6] * 30) == 0
    assert not any(isinstance(one, Active) and one.is_load for one in driver.transfers.active.values())


@pytest.mark.parametrize("is_known", [False, True])
def test_only_what_is_known_to_be_computed_is_stored(is_known: bool) -> None:
    driver = make_driver(depth=1)
    driver.add(make_request("a", PROMPT))
    driver.step()
    if is_known:
        driver.update()
    driver.scheduler.abort(["a"])
    transfers = driver.scheduler._transfers
    assert transfers is not None
    assert (transfers.take() is not None) == is_known


def test_a_prefill_waits_where_blocks_that_were_promised_to_it_are_pinned() -> None:
    driver = make_driver(WINDOW, budget=9, num_blocks=40)
    driver.add(make_request("decodes", [1, 2, 3], max_tokens=20), make_request("long", PROMPT, max_tokens=2))
    driver.step()
    pool = driver.scheduler.manager.pool
    kept = pool.free_queue.block_ids()[1:]
    pool.pin(kept)
    step = driver.scheduler.schedule()
    assert step is not None
    assert list(step.num_scheduled_tokens) == ["decodes"]
    driver.in_flight.append((step, driver.runner.execute(step)))
    pool.unpin(kept)
    driver.update()
    driver.run()
    for name, prompt, max_tokens in (("decodes", [1, 2, 3], 20), ("long", PROMPT, 2)):
        assert_as_alone(driver.answers[name], make_request(name, prompt, max_tokens=max_tokens), 128)


def test_a_loaded_prefix_gives_way_before_a_request_is_preempted() -> None:
    driver = make_driver(num_blocks=24, max_num_seqs=2)
    run(driver, "a", PROMPT)
    drop_what_is_cached(driver)
    driver.transfers.store.chance = 0.0
    driver.add(make_request("first", [1] * 15, max_tokens=24), make_request("loads", PROMPT, max_tokens=2))
    driver.step()
    driver.add(make_request("second", [2] * 15, max_tokens=24))
    driver.step()
    driver.run()
    assert driver.transfers.num_ended["load finished"] == 1
    assert driver.scheduler.stats().num_preemptions == 0

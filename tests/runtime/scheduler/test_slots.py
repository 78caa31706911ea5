"""Groups of slots: snapshots of recurrent state are made, taken up, and given back."""

from __future__ import annotations

import msgspec
import pytest

from compile_and_serve.runtime.messages import Sibling
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Prompt, Request
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo
from tests.support.scheduler_harness import Driver, assert_as_alone, continuation, make_request, make_scheduler

FULL = StateGroupInfo("tokens", 4)
SLOT = StateGroupInfo("slot", 4, pages_per_slot=2, snapshots=True)
RING = msgspec.structs.replace(SLOT, rollback_tokens=20)
SYSTEM = [i % 13 for i in range(40)]


def make_driver(*groups: StateGroupInfo, depth: int = 0, **options: int) -> Driver:
    return Driver(make_scheduler(**{"num_blocks": 400, "budget": 512, "max_model_len": 512} | options, groups=groups), depth)  # type: ignore[arg-type]


def chunks(driver: Driver, request_id: str) -> list[int]:
    """Tokens of each step of the request."""
    return [step.num_scheduled_tokens[request_id] for step in driver.steps if request_id in step.num_scheduled_tokens]


def num_cached(driver: Driver, request_id: str) -> int:
    return driver.answers[request_id].outputs[0].num_cached_tokens


def run(driver: Driver, request_id: str, prompt: list[int], max_tokens: int = 4) -> int:
    """Run a request alone; → how many tokens it found."""
    driver.add(request := make_request(request_id, prompt, max_tokens=max_tokens))
    assert_as_alone(driver.run()[request_id], request, 512)
    return num_cached(driver, request_id)


def test_a_prompt_is_cut_at_its_last_boundary_and_its_state_moves() -> None:
    driver = make_driver(FULL, SLOT)
    run(driver, "a", SYSTEM[:11])
    assert chunks(driver, "a") == [8, 3, 1, 1, 1]
    [new] = driver.steps[0].new_requests
    assert len(new.block_ids[1]) == 2
    [moved] = driver.steps[1].cached_requests
    assert moved.new_block_ids[0] == []
    assert len(moved.new_block_ids[1]) == 2
    assert not set(moved.new_block_ids[1]) & set(new.block_ids[1])
    assert all(not any(grown.new_block_ids[1] for grown in step.cached_requests) for step in driver.steps[2:])

    assert run(driver, "b", [*SYSTEM[:8], 1, 2]) == 8
    [again] = driver.steps[5].new_requests
    assert again.block_ids[1][:2] == new.block_ids[1]
    assert not set(again.block_ids[1][2:]) & set(new.block_ids[1])
    assert chunks(driver, "b") == [2, 1, 1, 1]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("length", "wanted"), [(11, [11, 1, 1, 1]), (9, [9, 1, 1, 1]), (12, [8, 4, 1, 1, 1])])
def test_a_prompt_whose_state_can_be_rolled_back_goes_on_in_the_same_step(length: int, wanted: list[int], depth: int) -> None:
    """The state after the prompt becomes the snapshot, and the first decode moves. 12 tokens are too far behind the snapshot at 8."""
    driver = make_driver(FULL, msgspec.structs.replace(SLOT, rollback_tokens=3), depth=depth)
    run(driver, "a", SYSTEM[:length])
    assert chunks(driver, "a") == wanted
    moves = [grown.new_block_ids[1] for step in driver.steps for grown in step.cached_requests if grown.new_block_ids[1]]
    assert [len(pages) for pages in moves] == [2]
    assert run(driver, "b", [*SYSTEM[:8], 1, 2]) == 8
    assert driver.scheduler.manager.num_promised == 0
    assert driver.scheduler.manager.pool.num_free == 400


def test_a_state_that_moves_in_a_decode_has_pages_promised() -> None:
    """Two blocks of tokens and twice the 2 pages of a slot for each request: 13 blocks are enough for two at a time."""
    driver = make_driver(FULL, msgspec.structs.replace(SLOT, rollback_tokens=3), num_blocks=13)
    for name, first in (("a", 3), ("b", 5), ("c", 7)):
        driver.add(make_request(name, [first] * 7, max_tokens=2))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    assert driver.scheduler.manager.num_promised == 0


@pytest.mark.parametrize("groups", [[SLOT], [SLOT, FULL], [FULL, SLOT, StateGroupInfo("tokens", 2, 6)], [RING, SLOT]])
def test_snapshots_are_found_beside_any_groups(groups: list[StateGroupInfo]) -> None:
    driver = make_driver(*groups)
    assert run(driver, "a", SYSTEM[:30]) == 0
    assert run(driver, "b", SYSTEM) == 28
    assert run(driver, "c", SYSTEM) == 36
    assert run(driver, "d", SYSTEM[:29]) == 28


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_next_turn_takes_up_the_state_of_the_last(depth: int) -> None:
    driver = make_driver(FULL, RING, depth=depth)
    run(driver, "a", SYSTEM[:10], max_tokens=9)
    conversation = SYSTEM[:10] + continuation(SYSTEM[:10], 9)
    assert run(driver, "b", [*conversation, 1, 2]) == 16


def test_without_roll_back_a_prompt_that_goes_on_from_an_answer_makes_a_snapshot_there() -> None:
    driver = make_driver(FULL, SLOT)
    run(driver, "a", SYSTEM[:10], max_tokens=9)
    conversation = SYSTEM[:10] + continuation(SYSTEM[:10], 9)
    assert run(driver, "b", conversation + [1] * 10) == 8
    assert chunks(driver, "b")[:3] == [8, 12, 1]  # cut at 16, where a's pages end, and at 28
    assert run(driver, "c", conversation + [2] * 10) == 16


@pytest.mark.parametrize("groups", [[FULL, SLOT], [SLOT]])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_shared_beginning_gets_a_snapshot_when_it_is_seen_twice(depth: int, groups: list[StateGroupInfo]) -> None:
    driver = make_driver(*groups, depth=depth)
    hits = [run(driver, f"r{i}", SYSTEM + [20 + i] * 9) for i in range(3)]
    assert hits == [0, 0, 40]


def test_a_long_prompt_leaves_snapshots_at_growing_distances_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.runtime.scheduler.kv_cache_manager.SNAPSHOT_DISTANCE", 16)
    driver = make_driver(FULL, SLOT)
    prompt = [i % 17 for i in range(203)]
    assert run(driver, "a", prompt) == 0
    assert chunks(driver, "a")[:5] == [72, 64, 32, 16, 16]  # up to 72, 136, 168, 184 and 200
    assert run(driver, "b", prompt[:180] + [20] * 9) == 168  # computes no more again than what it does not share
    assert run(driver, "c", prompt[:100] + [20] * 9) == 72
    assert run(driver, "d", prompt[:31]) == 0  # too short for more than one at its end
    assert chunks(driver, "d")[0] == 28


def test_a_snapshot_that_saves_much_outlives_one_that_saves_little() -> None:
    """Both are left at the same time; then the cache is replaced by other requests."""
    driver = make_driver(FULL, SLOT, num_blocks=60)
    long, short = [i % 17 for i in range(101)], [20 + i % 3 for i in range(5)]
    for name, prompt in (("long", long), ("short", short)):
        run(driver, name, prompt, max_tokens=1)
    cached = driver.scheduler.manager.pool.cached
    slots = {block.key: block for block in cached.values() if block.followers}
    assert sorted(block.worth for block in slots.values()) == [4 / 8, 100 / 8]
    for i in range(8):
        run(driver, f"{i}", [30 + i] * 23, max_tokens=1)
    assert {block.worth for key, block in slots.items() if key in cached} == {100 / 8}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_siblings_wait_for_the_snapshot_of_a_prompt_in_chunks(depth: int) -> None:
    driver = make_driver(FULL, SLOT, depth=depth, budget=64)
    prompt = [i % 17 for i in range(203)]
    request = msgspec.structs.replace(make_request("r", prompt, max_tokens=3), siblings=[Sibling(f"s{i}") for i in range(3)])
    driver.add(request)
    for answer in driver.run().values():
        assert_as_alone(answer, request, 512)
    assert driver.runner.num_prefilled == 203 + 3 * 3


def test_a_request_alone_fits_with_and_without_a_snapshot() -> None:
    """22 blocks: 18 of tokens, and twice the 2 pages of a slot."""
    driver = make_driver(FULL, SLOT, num_blocks=22)
    assert driver.scheduler.max_len == 18 * 4
    prompt = [i % 17 for i in range(70)]
    assert run(driver, "a", prompt[:40], max_tokens=2) == 0
    assert run(driver, "b", prompt, max_tokens=2) == 36
    assert chunks(driver, "b") == [4, 28, 2, 1]
    assert run(driver, "c", prompt, max_tokens=2) == 68
    assert run(driver, "d", [9, *prompt], max_tokens=1) == 0
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_slot_without_snapshots_takes_its_pages_once_and_shares_nothing() -> None:
    driver = make_driver(FULL, msgspec.structs.replace(SLOT, snapshots=False), num_blocks=20)
    assert driver.scheduler.max_len == 18 * 4
    assert [run(driver, name, SYSTEM) for name in "ab"] == [0, 0]
    assert chunks(driver, "a") == [40, 1, 1, 1]


def test_pages_that_a_step_reads_are_not_handed_out_in_it() -> None:
    driver = make_driver(FULL, SLOT)
    manager = driver.scheduler.manager
    driver.add(make_request("a", SYSTEM[:11]))
    driver.step()
    [request] = driver.scheduler._running
    before = request.block_ids[1].copy()
    assert manager.grow_for_chunk(request, 8, 11) is not None
    assert request.block_ids[1][:2] == before
    assert not set(manager.pool.allocate(manager.pool.num_free)) & set(before)
    manager.end_step()
    assert sorted(manager.pool.free_queue.block_ids()) == sorted(before)


@pytest.mark.parametrize("num_computed, is_kept", [(9, True), (10, True), (11, False)])
def test_a_state_that_may_hold_rejected_drafts_is_kept_only_if_they_can_be_rolled_back(num_computed: int, is_kept: bool) -> None:
    """2 of the 4 tokens that can be rolled back may be drafts: the state after 8 tokens can be taken up from one after 10."""
    group = msgspec.structs.replace(SLOT, rollback_tokens=4)
    manager = KVCacheManager(8, [group], max_step_tokens=8, enable_prefix_caching=True, max_draft_tokens=2)
    message = make_request("a", SYSTEM[:12])
    request = Request(message, Prompt(message), key=(0.0,), max_len=64, now=0.0)
    prefix = manager.find_prefix(request, 0)
    assert prefix is not None
    manager.admit(request, prefix)
    request.num_computed_tokens = num_computed
    manager.free(request, 3)
    assert len(manager.pool.cached) == is_kept
    assert manager.pool.num_free == 8


@pytest.mark.parametrize("groups", [[FULL], [FULL, SLOT], [SLOT]])
def test_what_was_computed_from_a_failed_prefill_is_forgotten_too(groups: list[StateGroupInfo]) -> None:
    """b goes on from what a computes, and ends before the failure of a is known. c would find what b left behind a's tokens."""
    driver = make_driver(*groups, depth=2)
    long = [*SYSTEM, *[20] * 40]
    driver.add(make_request("a", SYSTEM[:9]))
    driver.runner.poison.add("a")
    driver.runner.fail_on["a"] = "Its logits are not finite."
    driver.step()
    driver.add(make_request("b", long, max_tokens=1))
    driver.step()
    driver.scheduler.abort(["b"])
    driver.run()
    assert driver.answers["a"].finish_reason == "error"
    run(driver, "again", SYSTEM[:9])
    run(driver, "c", long)


def test_who_took_up_the_state_of_a_failed_prefill_starts_again_even_if_it_is_evicted() -> None:
    driver = make_driver(SLOT, depth=2)
    driver.add(make_request("a", SYSTEM[:9]))
    driver.runner.poison.add("a")
    driver.runner.fail_on["a"] = "Its logits are not finite."
    driver.step()
    driver.add(request := make_request("b", [*SYSTEM, 1, 2], max_tokens=9))
    driver.step()
    pool = driver.scheduler.manager.pool
    pool.free(pool.allocate(pool.num_free))
    driver.run()
    [first, second] = [new for step in driver.steps for new in step.new_requests if new.request_id == "b"]
    assert (first.num_computed_tokens, second.num_computed_tokens) == (8, 0)
    assert_as_alone(driver.answers["b"], request, 512)


def test_the_state_that_a_failed_decode_left_is_forgotten() -> None:
    driver = make_driver(FULL, RING, depth=2)
    driver.add(make_request("a", SYSTEM[:10], max_tokens=30))
    for _ in range(10):
        driver.step()
    driver.runner.poison.add("a")
    driver.runner.fail_on["a"] = "Its logits are not finite."
    driver.step()
    known = driver.scheduler.requests["a"].token_ids.copy()
    driver.scheduler.abort(["a"])  # while the step that fails is in flight
    driver.run()
    assert run(driver, "b", [*known, 1, 2, 3]) == 8


def test_a_snapshot_is_evicted_as_a_whole() -> None:
    driver = make_driver(SLOT, num_blocks=8)
    pool = driver.scheduler.manager.pool
    assert [run(driver, name, [ord(name)] * 6) for name in "abc"] == [0, 0, 0]
    assert len(pool.cached) == 3
    assert sum(block.key is not None for block in pool.blocks) == 6
    assert run(driver, "d", [ord("d")] * 6) == 0  # takes the place of a's
    assert len(pool.cached) == 3
    assert [run(driver, name * 2, [ord(name)] * 6) for name in "bcda"] == [4, 4, 4, 0]

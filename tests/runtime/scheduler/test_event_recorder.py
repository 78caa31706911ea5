"""Whoever follows the events knows at each step what the prefix cache has."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from compile_and_serve.runtime.scheduler.event_recorder import EventRecorder
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput, StateGroupInfo
from tests.support.fake_connector import FakeStore, TransferDriver
from tests.support.scheduler_harness import Driver, make_request, make_scheduler
from tests.support.scheduler_workloads import TOKENS, WORKLOADS, check_workload, slots


class Follower:
    """Keeps what the events say."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.recorder = scheduler.manager.pool.events = EventRecorder(scheduler.groups)
        self.pool = scheduler.manager.pool
        self.tokens_per_key = scheduler.manager.chains.tokens_per_key
        self.held: set[tuple[int, bytes]] = set()
        self.stored: list[BlockStored] = []

    def follow(self) -> None:
        batch = self.recorder.take()
        for event in () if batch is None else batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                continue
            assert event.group_idx is not None
            named = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
            assert len(named) == len(event.block_hashes)
            if isinstance(event, BlockRemoved):
                assert named <= self.held
                self.held -= named
            else:
                assert not named & self.held
                self.held |= named
                self.stored.append(event)
                self.check_hashes(event)
        assert self.held == {(int.from_bytes(key[32:]), key[:32]) for key in self.pool.cached}

    def check_hashes(self, event: BlockStored) -> None:
        """They follow from the parent and the tokens, as far as there is nothing else."""
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        if event.parent_block_hash is not None and event.extra_keys is None:
            step, keys = event.block_size // self.tokens_per_key, list[bytes]()
            extend_keys(keys, event.parent_block_hash, event.token_ids, self.tokens_per_key, len(event.block_hashes) * step)
            assert keys[step - 1 :: step] == event.block_hashes


def followed(driver: Driver) -> Driver:
    follower, check = Follower(driver.scheduler), driver.check

    def check_and_follow(step: SchedulerOutput | None) -> None:
        check(step)
        follower.follow()

    driver.check = check_and_follow  # type: ignore[method-assign]
    return driver


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.one_of(TOKENS, slots(st.just(True))), min_size=1, max_size=3),
    num_blocks=st.integers(16, 60),
    has_connector=st.booleans(),
    **WORKLOADS,
)
def test_events_say_what_is_cached(groups: list[StateGroupInfo], num_blocks: int, has_connector: bool, **workload: Any) -> None:
    store = FakeStore(random.Random(workload["seed"]), 0.5) if has_connector else None

    def connected(scheduler: Scheduler, depth: int, seed: int) -> Driver:
        return followed(Driver(scheduler, depth, seed) if store is None else TransferDriver(scheduler, store, depth, seed, 1.0))

    def lose(driver: Driver) -> None:
        driver.scheduler.manager.reset_prefix_cache()

    check_workload(groups, num_blocks, True, connected=connected, connector=store, between_rounds=[lose], **workload)


def stored_by(requests: Iterable[Any], *groups: StateGroupInfo) -> list[BlockStored]:
    scheduler = make_scheduler(num_blocks=200, groups=groups)
    driver = Driver(scheduler)
    follower = Follower(scheduler)
    driver.add(*requests)
    driver.run()
    follower.follow()
    return follower.stored


@pytest.mark.parametrize(
    "group, kind, window",
    [
        (StateGroupInfo("tokens", 4), "full_attention", None),
        (StateGroupInfo("tokens", 4, 6), "sliding_window", 6),
        (StateGroupInfo("slot", 4, pages_per_slot=2, snapshots=True), "mamba", None),
    ],
)
def test_each_kind_of_group_has_vllms_name(group: StateGroupInfo, kind: str, window: int | None) -> None:
    [first, *_] = stored_by([make_request("a", list(range(1, 14)))], group)
    assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window, first.medium) == (kind, window, "GPU")


def test_what_a_salt_changes_is_told_and_the_salt_is_not() -> None:
    group = StateGroupInfo("tokens", 4)
    request = make_request("a", list(range(1, 10)), max_tokens=1)
    [plain] = stored_by([request], group)
    [other] = stored_by([msgspec.structs.replace(request, cache_salt="secret")], group)
    assert plain.extra_keys is None
    assert other.extra_keys is not None
    assert other.extra_keys[1] is None
    assert "secret" not in repr(other)
    assert not set(plain.block_hashes) & set(other.block_hashes)


def test_other_places_have_names_of_their_own() -> None:
    recorder = EventRecorder([StateGroupInfo("tokens", 4), StateGroupInfo("tokens", 8)])
    keys = [bytes([number]) * 32 for number in range(3)]
    recorder.stored_elsewhere([keys[0], keys[1], keys[2] + b"\0\1"], "CPU")
    recorder.removed(keys[0], "CPU")
    batch = recorder.take()
    assert batch is not None
    first, second, removed = batch.events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, first.medium, first.token_ids, first.block_size) == (keys[:2], "CPU", [], 4)
    assert (second.block_hashes, second.group_idx, second.block_size) == ([keys[2]], 1, 8)
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium) == ([keys[0]], "CPU")

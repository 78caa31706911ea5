"""Loads and stores of blocks by a connector."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo
from tests.support.fake_connector import FakeStore, TransferDriver
from tests.support.scheduler_harness import Driver
from tests.support.scheduler_workloads import TOKENS, WORKLOADS, check_workload, slots

SEEN: Counter[str] = Counter()


@settings(max_examples=300, deadline=None)
@given(
    groups=st.lists(st.one_of(TOKENS, slots(st.just(True))), min_size=1, max_size=3),
    num_blocks=st.integers(16, 60),
    chance=st.sampled_from([0.1, 0.5, 1.0]),
    answers_cancels=st.sampled_from([0.0, 0.7, 1.0]),
    **WORKLOADS,
)
def test_random_workloads_with_a_connector(
    groups: list[StateGroupInfo], num_blocks: int, chance: float, answers_cancels: float, **workload: Any
) -> None:
    """Whenever loads and stores end, fail or do not come back: no block is handed out, read or written too early, and every request ends
    with its tokens.
    """
    store = FakeStore(random.Random(workload["seed"]), chance)

    def connected(scheduler: Scheduler, depth: int, seed: int) -> Driver:
        return TransferDriver(scheduler, store, depth, seed, answers_cancels)

    driver = check_workload(groups, num_blocks, True, connected=connected, connector=store, **workload)
    assert isinstance(driver, TransferDriver)
    assert not driver.stuck or driver.num_kept
    SEEN.update(driver.transfers.num_ended)


def test_the_workloads_load_and_store() -> None:
    print(SEEN)

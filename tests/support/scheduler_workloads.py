"""Random workloads for the scheduler's property tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import strategies as st

from compile_and_serve.runtime.connector.connector import SchedulerConnector
from compile_and_serve.runtime.drafting.payoff import Payoff
from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.scheduler import admission, free_slots
from compile_and_serve.runtime.scheduler import scheduler as scheduler_module
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo
from compile_and_serve.runtime.speculative_config import SpeculativeConfig
from tests.support.drafters import all_that_fit
from tests.support.scheduler_harness import Driver, assert_as_alone, make_scheduler, random_requests, run_random_workload

SIZES = st.sampled_from([2, 4, 8])
TOKENS = st.builds(StateGroupInfo, st.just("tokens"), SIZES, st.sampled_from([None, 1, 5, 9]))


def slots(snapshots: st.SearchStrategy[bool]) -> st.SearchStrategy[StateGroupInfo]:
    pages, rollback = st.integers(1, 3), st.sampled_from([0, 2, 8, 20])
    return st.builds(StateGroupInfo, st.just("slot"), SIZES, pages_per_slot=pages, snapshots=snapshots, rollback_tokens=rollback)


WORKLOADS = {
    "seed": st.integers(0, 2**32),
    "num_requests": st.integers(1, 16),
    "num_draft_tokens": st.integers(0, 3),
    "max_num_seqs": st.integers(1, 8),
    "budget": st.integers(4, 24),
    "depth": st.integers(0, 3),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "num_aborts": st.integers(0, 3),
    "admit_in_groups": st.booleans(),
    "min_gained_tokens": st.sampled_from([1, 5, 100]),
}

# Small enough that all of them matter in small tests.
SMALL_LIMITS = {"HASHED_TOKENS": 8, "ADMITTED_TOKENS": 40}


def check_workload(
    groups: list[StateGroupInfo],
    num_blocks: int,
    caching: bool,
    *,
    seed: int,
    num_requests: int,
    num_draft_tokens: int,
    max_num_seqs: int,
    budget: int,
    depth: int,
    policy: str,
    num_aborts: int,
    admit_in_groups: bool,
    min_gained_tokens: int,
    connected: Callable[[Scheduler, int, int], Driver] = Driver,
    connector: SchedulerConnector | None = None,
    between_rounds: Sequence[Callable[[Driver], None]] = (),
) -> Driver:
    """Every request gets the tokens that it would get alone, unless it is aborted or fails, and every block comes back. connected: makes
    the driver. between_rounds: the requests come once more after each of these.
    """
    rng = random.Random(seed)
    speculator = None
    if num_draft_tokens:
        speculative = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=num_draft_tokens)
        speculator = Speculator(speculative, max_rows=budget, is_asynchronous=True)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
        max_model_len=60,
        caching=caching,
        policy=policy,
        admit_in_groups=admit_in_groups,
        groups=[msgspec.structs.replace(group, rollback_tokens=group.rollback_tokens + num_draft_tokens) for group in groups],
        speculator=speculator,
        drafts_run_ahead=depth == 1,
        connector=connector,
    )
    requests = random_requests(rng, num_requests, scheduler.max_len)
    driver = connected(scheduler, depth, seed)
    small = patch.multiple(admission, MIN_SHARED_TOKENS=min_gained_tokens, **SMALL_LIMITS)
    few_rows = patch.object(scheduler_module, "PROMPT_LOGPROB_ROWS", 12)
    all_drafts = patch.multiple(Payoff, is_on=lambda self, num_seqs: True, draft_lengths=all_that_fit)
    for prepare in (None, *between_rounds):
        if prepare is not None:
            prepare(driver)
        driver.answers = {}
        driver.runner.fail_on.clear()
        driver.runner.poison.clear()
        with small, few_rows, all_drafts, patch.object(free_slots, "GROUP_FRACTION", 1):
            _, lost = run_random_workload(rng, driver, requests, num_aborts)
        for request in requests:
            for request_id in request.request_ids:
                if request_id not in lost and request_id not in driver.stuck:
                    assert_as_alone(driver.answers[request_id], request, scheduler.max_len)
    if policy == "fcfs" and not caching and connector is None and all(r.sampling_params.prompt_logprobs is None for r in requests):
        first_scheduled = list(dict.fromkeys(new.request_id for step in driver.steps for new in step.new_requests))
        assert first_scheduled == sorted(first_scheduled, key=lambda request_id: float(request_id[1:]))
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.kv_cache_usage == pytest.approx(driver.num_kept / num_blocks)
    assert stats.prefix_cache_hits <= stats.prefix_cache_queries
    return driver

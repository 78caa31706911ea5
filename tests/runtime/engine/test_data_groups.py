"""Data-parallel attention: an engine with a scheduler for each group of ranks, whose ranks step together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.engine.data_groups import DataGroups
from compile_and_serve.runtime.messages import RequestOutput, Tenant
from compile_and_serve.runtime.scheduler.request_checks import TenantLimitError
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

SMALL = {"num_kv_blocks": 40, "max_model_len": 120, "max_num_seqs": 4}  # few blocks, so that requests are preempted


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("groups") / "tiny")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[RequestOutput]]:
    return run_requests(EngineCore(tiny_config(model_dir, max_model_len=120)), mixed_requests())


def start(model_dir: Path, **options: Any) -> EngineCore:
    return EngineCore(tiny_config(model_dir, data_parallel_attention_size=2, **SMALL, **options))


@pytest.fixture(scope="module")
def core(model_dir: Path) -> Iterator[EngineCore]:
    core = start(model_dir, verify_state=True)
    assert core.canaries is not None
    for canary in core.canaries:
        canary.seconds = 0.0
    yield core
    assert [len(canary.findings) for canary in core.canaries] == [0, 0]
    core.shutdown()


def groups_of(core: EngineCore) -> DataGroups:
    assert isinstance(core._scheduler, DataGroups)
    return core._scheduler


@pytest.mark.slow
def test_tokens_are_those_of_one_rank(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    """Ten requests of all kinds over two groups of four batch slots and few blocks."""
    assert tokens_of(run_requests(core, mixed_requests())) == tokens_of(expected)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_total_blocks == 2 * 40 == stats.num_free_blocks
    assert stats.padded_tokens > 0
    assert core.info.max_running == 8
    assert all(member.stats().prefix_cache_queries > 0 for member in groups_of(core).members)
    assert core.canaries is not None
    assert all(canary.num_checked > 0 for canary in core.canaries)


def test_one_group_alone_and_its_cached_prefix(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    """The other group computes padding; a prompt returns to the group that has its blocks."""
    core.utility("reset_prefix_cache")
    one = mixed_requests()[4]
    before = [member.stats() for member in groups_of(core).members]
    for _ in range(3):
        assert tokens_of(run_requests(core, [one])) == {one.request_id: tokens_of(expected)[one.request_id]}
    after = [member.stats() for member in groups_of(core).members]
    hits = [new.prefix_cache_hits - old.prefix_cache_hits for old, new in zip(before, after, strict=True)]
    assert sorted(hits) == [0, 2 * 56]


def test_uneven_load_and_aborts(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    """Long prompts beside decodes, and requests that end in the middle."""
    requests = mixed_requests()
    for one in requests:
        core.add_request(one)
    outputs: dict[str, list[RequestOutput]] = {one.request_id: [] for one in requests}
    aborted = {"r0", "r4", "r7"}
    for number in range(10_000):
        if number == 3:
            core.abort(aborted)
        if not core.has_work():
            break
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    found = tokens_of(outputs)
    assert {name: found[name] for name in found if name not in aborted} == {
        name: tokens for name, tokens in tokens_of(expected).items() if name not in aborted
    }
    assert core.stats().num_free_blocks == 80


def test_limits_of_a_key_hold_over_groups(core: EngineCore) -> None:
    tenant = Tenant("key", max_running=1, max_waiting=2)
    for number in range(3):
        core.add_request(request(f"k{number}", prompt_of(number, 5), max_tokens=4))
    groups = groups_of(core)
    core.abort(["k0", "k1", "k2"])
    for number in range(3):
        one = request(f"k{number}", prompt_of(number, 5), max_tokens=4)
        one.tenant = tenant
        core.add_request(one)
    late = request("late", prompt_of(9, 5))
    late.tenant = tenant
    with pytest.raises(TenantLimitError, match="its limit is 3"):
        core.add_request(late)
    most = 0
    while core.has_work():
        core.step()
        most = max(most, sum(member.stats().num_running for member in groups.members))
    assert most == 1


def test_waiting_requests_move_to_a_group_with_room(core: EngineCore) -> None:
    """Seven requests share a prefix, so that they go to one group of four slots; three of them run in the other one."""
    core.utility("reset_prefix_cache")
    groups = groups_of(core)
    shared = prompt_of(3, 24)
    run_requests(core, [request("first", shared, max_tokens=2)])
    requests = [request(f"m{number}", [*shared, number], max_tokens=3) for number in range(7)]
    for one in requests:
        index = groups._router.replica_of("first") or 0
        groups._router.assign(one, index)  # as if all had been sent there
        groups.members[index].add_request(one)
        groups._movable[one.request_id] = one
    core.step()
    core.step()
    assert sorted(len(member.requests) for member in groups.members) == [3, 4]
    while core.has_work():
        core.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_does_not_go_with_groups(model_dir: Path, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"Data-parallel attention over 2 groups of ranks does not go with {wrong}"):
        tiny_config(model_dir, data_parallel_attention_size=2, enforce_eager=False, **options)


@pytest.mark.exhaustive
def test_collectives_over_groups(model_dir: Path, shared_cache_dir: Path, expected: dict[str, list[RequestOutput]]) -> None:
    """All groups run as many tokens and rows in each step, or their ranks could not meet."""
    options = {"enforce_eager": False, "user_passes": ["tests.support.meeting_groups:MeetBeforeLinears"]}
    core = start(model_dir, cache_dir=shared_cache_dir, **options)
    try:
        assert tokens_of(run_requests(core, mixed_requests())) == tokens_of(expected)
        one = mixed_requests()[2]
        assert tokens_of(run_requests(core, [one])) == {one.request_id: tokens_of(expected)[one.request_id]}
    finally:
        core.shutdown()

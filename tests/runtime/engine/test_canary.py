"""Planted corruptions: the canary finds each, ends the requests that hold the block with a sentence, and raises no false alarm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import RequestOutput
from compile_and_serve.runtime.scheduler.recomputation import Recomputation
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    core = EngineCore(tiny_config(write_tiny_model(tmp_path_factory.mktemp("canary") / "model"), verify_state=True, num_kv_blocks=64))
    assert core.canaries is not None
    [canary] = core.canaries
    canary.seconds = 0.0  # a round in every step
    assert core.canaries.recomputation is not None
    core.canaries.recomputation.seconds = 1e9
    yield core
    core.shutdown()


def pages(core: EngineCore) -> torch.Tensor:
    """The bytes of a layer's keys and values, by page."""
    runner = core.executor.worker.runner  # type: ignore[attr-defined]
    part: torch.Tensor = runner.page_memory().parts[0][0]
    return part.view(torch.uint8)


def flip_a_bit(core: EngineCore, block: int, other: int) -> None:
    pages(core)[block].view(-1)[5] ^= 1


def write_another_block(core: EngineCore, block: int, other: int) -> None:
    """As a wrong block id in a slot mapping does."""
    content = pages(core)
    content[block] = content[other]


def shift_by_a_token(core: EngineCore, block: int, other: int) -> None:
    content = pages(core)
    content[block] = content[block].roll(1, 0)


def fill_with_zeros(core: EngineCore, block: int, other: int) -> None:
    pages(core)[block] = 0


def poison(core: EngineCore, block: int, other: int) -> None:
    """As a block that is freed and still used."""
    core.executor.worker.runner.page_memory().poison([block])  # type: ignore[attr-defined]


def swap_bytes(core: EngineCore, block: int, other: int) -> None:
    flat = pages(core)[block].view(-1)
    first, second = int(flat[0]), int((flat != flat[0]).nonzero()[0])
    flat[0], flat[second] = flat[second].clone(), first


def table(core: EngineCore) -> torch.Tensor:
    runner = core.executor.worker.runner  # type: ignore[attr-defined]
    [tables] = runner.batch.tables.values()
    rows: torch.Tensor = tables._batch_table
    return rows


def stale_table(core: EngineCore, block: int, other: int) -> None:
    table(core)[0, 1] = table(core)[0, 0].clone()


def wrong_block_in_table(core: EngineCore, block: int, other: int) -> None:
    table(core)[0, 2] = 63


def row_of_another_request(core: EngineCore, block: int, other: int) -> None:
    rows = table(core)
    rows[0] = rows[1].clone()


def two_requests_have_a_block(core: EngineCore, block: int, other: int) -> None:
    rows = table(core)
    rows[1, 0] = rows[0, 0].clone()


OVERWRITES = [flip_a_bit, write_another_block, shift_by_a_token, fill_with_zeros, poison, swap_bytes]
WRONG_TABLES = [stale_table, wrong_block_in_table, row_of_another_request, two_requests_have_a_block]


@pytest.mark.slow_cases
@pytest.mark.parametrize("corrupt", [*OVERWRITES, *WRONG_TABLES])
def test_a_planted_corruption_is_found_and_ends_its_request(core: EngineCore, corrupt: Callable[[EngineCore, int, int], None]) -> None:
    assert core.canaries is not None
    [canary] = core.canaries
    num_before = len(canary.findings)
    for number in range(2):
        core.add_request(request(f"{corrupt.__name__} {number}", prompt_of(number, 30), max_tokens=150, ignore_eos=True))
    outputs: list[RequestOutput] = []
    for _ in range(40):  # the canary has seen the blocks of the prompts
        outputs += core.step().outputs
    assert not [output for output in outputs if output.error]
    [first, second] = core._scheduler.requests.values()
    block, num_steps = first.block_ids[0][1], core._scheduler._next_step
    corrupt(core, block, second.block_ids[0][2])
    for _ in range(60):
        outputs += core.step().outputs
    errors = {output.request_id: output.error for output in outputs if output.error is not None}
    assert errors, "nothing was found"
    sentence = next(iter(errors.values()))
    assert sentence in canary.findings[num_before:]
    if corrupt in OVERWRITES:
        said = re.search(r"step (\d+) overwrote block (\d+) |steps (\d+) to (\d+) overwrote block (\d+) ", sentence)
        assert said is not None, sentence
        begin, found, first_step, last_step, found_later = said.groups()
        assert int(found or found_later) == block
        assert int(begin or first_step) <= num_steps <= int(begin or last_step) + 1
        assert f"{corrupt.__name__} 0" in errors
    else:
        assert "wrong block table" in sentence
    core.abort(list(core._scheduler.requests))
    while core.has_work():
        core.step()
    assert core._scheduler.reset_prefix_cache()
    assert tokens_of(run_requests(core, [request("after", prompt_of(3, 20))]))["after"]


@pytest.fixture
def recomputation(core: EngineCore) -> Iterator[Recomputation]:
    """It looks all the time, and checksums are not taken."""
    assert core.canaries is not None
    [canary] = core.canaries
    found = core.canaries.recomputation
    assert found is not None
    canary.seconds, found.seconds = 1e9, 0.0
    yield found
    canary.seconds, found.seconds = 0.0, 1e9


@pytest.mark.parametrize("corrupt", [write_another_block, shift_by_a_token, fill_with_zeros, poison])
def test_what_was_wrong_from_the_beginning_is_found(
    core: EngineCore, recomputation: Recomputation, corrupt: Callable[[EngineCore, int, int], None]
) -> None:
    outputs: list[RequestOutput] = []
    for number in range(2):
        core.add_request(request(f"{corrupt.__name__} again {number}", prompt_of(number, 12), max_tokens=120, ignore_eos=True))
    outputs += core.step().outputs
    first, second = (core._scheduler.requests[f"{corrupt.__name__} again {number}"] for number in range(2))
    corrupt(core, first.block_ids[0][1], second.block_ids[0][2])
    while core.has_work():
        outputs += core.step().outputs
    errors = {output.request_id: output.error or "" for output in outputs if output.finish_reason == "error"}
    assert list(errors) == [first.request_id]
    assert f"of request {first.request_id} again and found that block" in errors[first.request_id]
    assert {output.request_id for output in outputs} == {first.request_id, second.request_id}
    assert core._scheduler.reset_prefix_cache()


def test_what_is_computed_again_is_the_same(core: EngineCore, recomputation: Recomputation) -> None:
    assert core.canaries is not None
    [canary] = core.canaries
    num_before, num_checked = len(canary.findings), recomputation.num_checked
    for number in range(4):
        requests = mixed_requests()
        for one in requests:
            one.request_id = f"{one.request_id} again {number}"
        outputs = run_requests(core, requests)
        assert all(outputs.values())
    assert len(canary.findings) == num_before
    assert recomputation.num_checked - num_checked > 10
    assert core.stats().canary_recomputed_blocks == recomputation.num_checked


@pytest.mark.slow
def test_there_is_no_false_alarm_under_load(core: EngineCore) -> None:
    assert core.canaries is not None
    [canary] = core.canaries
    num_before, num_checked = len(canary.findings), canary.num_checked
    for number in range(8):  # blocks are evicted, requests preempted
        requests = mixed_requests()
        for one in requests:
            one.request_id = f"{one.request_id} {number}"
        run_requests(core, requests)
    assert len(canary.findings) == num_before
    assert canary.num_checked - num_checked > 100


def test_without_the_flag_there_is_no_canary(tmp_path: Path) -> None:
    core = EngineCore(tiny_config(write_tiny_model(tmp_path / "model")))
    assert core.canaries is None
    core.shutdown()

"""Steps with drafts that are launched before the tokens of the step before are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.compiler.cudagraphs.work_graphs import WorkGraphs
from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.runtime.drafting.model_drafts import ModelDrafts
from compile_and_serve.runtime.drafting.ngram import NgramDrafter
from compile_and_serve.runtime.drafting.ngram_drafts import NgramDrafts
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput
from tests.runtime.drafting.test_heads import METHODS, engine, folders
from tests.support.drafters import capture_all, check_every_draft, use_fake_graphs
from tests.support.engines import prompt_of, request, run_requests, tokens_of
from tests.support.platforms import OwnMemory

__all__ = ["folders"]  # a fixture

K = 3


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    """Engines run on a device with memory of its own, as a GPU's."""
    pytest.importorskip("triton")
    register_platform("cpu", OwnMemory)
    yield
    register_platform("cpu", CpuPlatform)


def given_requests() -> list[EngineRequest]:
    """They end one after another."""
    return [request(f"q{i}", prompt_of(i, 5 + 7 * i), max_tokens=30 + 6 * i) for i in range(5)]


def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each step with drafts that is launched from now on: does the scheduler run ahead, and does the device?"""
    launched: list[tuple[bool, bool]] = []
    launch = ModelRunner.launch

    def recorded(self: ModelRunner, scheduled: SchedulerOutput) -> PendingStep:
        pending = launch(self, scheduled)
        if scheduled.drafts:
            launched.append((scheduled.is_ahead, self.drafted.runs_ahead))
        return pending

    monkeypatch.setattr(ModelRunner, "launch", recorded)
    return launched


def perfect_drafts(monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, Sequence[int]], requests: Sequence[EngineRequest]) -> None:
    """The drafter of engines from now on says the answers, with an error at every fifth position. It uses the lengths on the device."""
    draft = ModelDrafts._draft
    texts = {one.request_id: [*one.prompt_token_ids, *answers[one.request_id], *[0] * K] for one in requests}

    def known(self: ModelDrafts, num_seqs: int, num_drafts: int, host: Any) -> None:
        draft(self, num_seqs, num_drafts, host)
        asked, batch = self._asked.device, self._batch
        names = {held.slot: name for name, held in batch._requests.items()}
        for row in range(num_seqs):
            slot, count = int(asked["slots"][row]), int(asked["counts"][row])
            if slot not in names:
                continue
            length = int(asked["positions"][row]) + 1 + int(asked["is_ahead"][row] * batch.num_new_tokens[slot])
            text = texts[names[slot]]
            for place in range(count):
                token = text[length + place]
                self.drafts[slot, place] = token if (length + place) % 5 else (token + 1) % 300

    monkeypatch.setattr(ModelDrafts, "_draft", known)


def both(
    folders: Mapping[str, Path],
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    given: list[EngineRequest],
    prepare: Callable[[dict[str, list[int]]], None] = lambda answers: None,
    *,
    speculation: Mapping[str, Any] = {},
    **options: Any,
) -> tuple[EngineCore, dict[str, list[int]], dict[str, list[int]]]:
    """An engine that runs ahead, its tokens, and those of an engine without drafts."""
    plain = engine(folders, method, drafts=False, max_num_seqs=8)
    expected = tokens_of(run_requests(plain, given))
    plain.shutdown()
    check_every_draft(monkeypatch)
    made = use_fake_graphs(monkeypatch, K, samples_greedily=True)
    prepare(expected)
    core = engine(folders, method, K, max_num_seqs=8, async_scheduling=True, speculation=speculation, **options)
    capture_all(made[0])
    return core, tokens_of(run_requests(core, given)), expected


QUICK = ("eagle3", "mtp", "draft_model")


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["eagle3"])
@pytest.mark.parametrize("method", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name not in QUICK)])
def test_tokens_are_those_without_drafts(method: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given, folders = given_requests(), {**folders, "draft_model": folders["llama"]}
    launched = record_steps(monkeypatch)
    core, found, expected = both(folders, method, monkeypatch, given, lambda answers: perfect_drafts(monkeypatch, answers, given))
    assert found == expected
    stats = core.stats()
    assert 0.4 < stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens < 0.95
    assert stats.num_free_blocks == stats.num_total_blocks
    assert launched.count((True, True)) > 0.85 * len(launched) > 10
    core.shutdown()


def test_ngrams_are_looked_up_on_the_device(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their drafts are those of the host's drafter."""
    given = given_requests()
    launched, found_drafts = record_steps(monkeypatch), []
    make_drafts = NgramDrafts._make_drafts

    def recorded(self: NgramDrafts, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        make_drafts(self, num_seqs, num_drafts, size, is_ahead=is_ahead)
        asked = self._asked.device
        lengths = self._known_positions() + 1
        for row in range(num_seqs):
            slot, count = int(asked["slots"][row]), int(asked["counts"][row])
            tokens = self._history_RW[slot, : int(lengths[row])].tolist()
            expected = NgramDrafter(1, 3).propose("r", tokens, count)
            found_drafts.append(expected)
            assert self.drafts[slot].tolist() == expected + [-1] * (K - len(expected))

    monkeypatch.setattr(NgramDrafts, "_make_drafts", recorded)
    core, found, expected = both(folders, "ngram", monkeypatch, given, speculation={"prompt_lookup_min": 1, "prompt_lookup_max": 3})
    assert found == expected
    stats = core.stats()
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens <= sum(map(len, found_drafts))
    assert [] in found_drafts
    assert launched.count((True, True)) > 0.85 * len(launched) > 10
    core.shutdown()


@pytest.mark.slow
def test_requests_whose_logits_depend_on_their_tokens_wait(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given = [request("plain", prompt_of(0, 9), max_tokens=60), request("penalized", prompt_of(1, 9), max_tokens=25, repetition_penalty=1.3)]
    launched = record_steps(monkeypatch)
    core, found, expected = both(folders, "eagle3", monkeypatch, given)
    assert found == expected
    assert (True, True) not in launched[:8]
    assert (True, True) in launched[-8:]
    core.shutdown()


@pytest.mark.exhaustive
def test_without_graphs_the_runner_waits_for_the_tokens(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_requests()
    launched = record_steps(monkeypatch)
    monkeypatch.setattr(WorkGraphs, "holds", lambda self, name, size: False)
    core, found, expected = both(folders, "eagle3", monkeypatch, given, lambda answers: perfect_drafts(monkeypatch, answers, given))
    assert found == expected
    assert (True, False) in launched
    assert (True, True) not in launched
    core.shutdown()


@pytest.mark.exhaustive
def test_a_step_ahead_may_lose_its_drafts(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last request gets drafts, and it is preempted for a block of the first."""
    given = [request("first", prompt_of(0, 30), max_tokens=50, speculate=False), request("last", prompt_of(1, 30), max_tokens=50)]
    without_drafts: list[bool] = []
    launch = ModelRunner.launch

    def recorded(self: ModelRunner, scheduled: SchedulerOutput) -> PendingStep:
        without_drafts.append(scheduled.is_ahead and not scheduled.drafts)
        return launch(self, scheduled)

    monkeypatch.setattr(ModelRunner, "launch", recorded)
    core, found, expected = both(folders, "eagle3", monkeypatch, given, num_kv_blocks=28, max_model_len=108)
    assert found == expected
    assert any(without_drafts)
    core.shutdown()


@pytest.mark.slow
def test_few_blocks_preempt_while_a_step_runs_ahead(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given = [request(f"q{i}", prompt_of(i, 30 + i), max_tokens=40) for i in range(8)]
    launched = record_steps(monkeypatch)
    core, found, expected = both(
        folders, "eagle3", monkeypatch, given, lambda answers: perfect_drafts(monkeypatch, answers, given), num_kv_blocks=80
    )
    assert found == expected
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_total_blocks
    assert (True, True) in launched
    core.shutdown()

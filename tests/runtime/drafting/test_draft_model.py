"""A smaller model drafts: no token changes, whatever it drafts and whatever happens to the requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.drafting.payoff import Payoff
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, RequestOutput
from tests.runtime.drafting.test_lossless import hard_requests
from tests.support.drafters import check_every_draft
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

PREEMPTING = {"num_kv_blocks": 90}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Tokens of `hard_requests` without drafts."""
    return tokens_of(run(folder, hard_requests(), None)[0])


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """A model like the one in `folder`, with changes of its config."""
    target.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def speculation(drafter: Path, **changes: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 4, **changes}


def run(
    folder: Path, requests: list[EngineRequest], config: dict[str, Any] | None, **options: Any
) -> tuple[dict[str, list[RequestOutput]], EngineStats]:
    core = EngineCore(tiny_config(folder, speculative_config=config, **({"max_num_batched_tokens": 64} | options)))
    outputs = run_requests(core, requests)
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()
    return outputs, stats


@pytest.mark.parametrize("options", [{}, PREEMPTING, {"enable_prefix_caching": False}], ids=["roomy", "preempting", "uncached"])
def test_a_drafter_that_errs_changes_nothing(
    folder: Path, expected: dict[str, list[int]], tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_draft(monkeypatch)
    drafter = changed(folder, tmp_path / "first-layer", num_hidden_layers=1)
    drafted, stats = run(folder, hard_requests(), speculation(drafter), **options)
    assert tokens_of(drafted) == expected
    assert 50 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens - 500
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)


def greedy_requests() -> list[EngineRequest]:
    """Prompts that come in chunks, and pairs that share a prefix."""
    return [request(f"g{i}", prompt_of(i // 2, 30 + 20 * i)[: 200 - i], max_tokens=12 + 5 * i, eos_token_ids=[]) for i in range(8)]


@pytest.mark.parametrize("options", [{}, PREEMPTING, {"async_scheduling": True}], ids=["roomy", "preempting", "ahead"])
def test_the_model_itself_drafts_what_it_says(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the drafter's cache holds what the model's holds: after chunks, prefix hits, preemptions and steps without drafts."""
    steps = iter(range(10_000))
    check_every_draft(monkeypatch)
    monkeypatch.setattr(Payoff, "is_on", lambda self, num_seqs: next(steps) % 12 < 8)
    drafted, stats = run(folder, greedy_requests(), speculation(folder), **options)
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 40
    assert stats.prefix_cache_hits > 0
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)
    plain, _ = run(folder, greedy_requests(), None)
    assert tokens_of(drafted) == tokens_of(plain)


def test_aborted_requests_leave_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    core = EngineCore(tiny_config(folder, speculative_config=speculation(folder)))
    for one in greedy_requests():
        core.add_request(one)
    for _ in range(5):
        core.step()
    core.abort([f"g{i}" for i in range(7)])
    outputs: list[RequestOutput] = []
    while core.has_work():
        outputs += core.step().outputs
    assert {one.request_id for one in outputs} == {"g7"}
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


def test_it_sleeps_and_wakes(folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    core = EngineCore(tiny_config(folder, speculative_config=speculation(folder)))
    core.sleep(2)
    core.wake_up()
    requests = hard_requests()[:3]
    assert tokens_of(run_requests(core, requests)) == {one.request_id: expected[one.request_id] for one in requests}
    assert core.stats().spec_decode_num_accepted_tokens > 10
    core.shutdown()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "has a vocabulary of 300 tokens and the model one of 320: choose a drafter with the same"),
        ({"max_position_embeddings": 128}, "positions end at 128, but max_model_len is 256: lower --max-model-len"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_one_sentence(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        EngineCore(tiny_config(folder, speculative_config=speculation(changed(folder, tmp_path / "other", **changes))))
    assert str(error.value).count("\n") == 0


def test_a_draft_model_reads_the_window_of_a_model_that_forgets_tokens(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windowed = changed(folder, tmp_path / "window", architectures=["MistralForCausalLM"], sliding_window=32)
    expected = tokens_of(run(windowed, hard_requests(), None)[0])
    for drafter, is_told in ((folder, True), (windowed, False)):
        caplog.clear()
        with caplog.at_level("INFO"):
            drafted = run(windowed, hard_requests(), speculation(drafter))[0]
        assert ("The drafter reads the last 32 tokens of a sequence" in caplog.text) == is_told
        assert tokens_of(drafted) == expected


@pytest.mark.slow
def test_both_models_are_compiled_once_and_start_from_artifacts(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_draft(monkeypatch)
    config = speculation(changed(folder, tmp_path / "first-layer", num_hidden_layers=1))
    stages: list[str] = []
    for start in ("cold", "warm"):
        core = EngineCore(
            tiny_config(folder, speculative_config=config, enforce_eager=False, cache_dir=tmp_path / "cache"),
            on_stage=lambda stage, seconds, detail: stages.append(stage),
        )
        assert tokens_of(run_requests(core, hard_requests())) == expected
        report = core.info.compile_report
        assert report["artifact"] == report["drafter.artifact"] == ("made" if start == "cold" else "hit")
        assert any(stage.startswith("drafter ") for stage in stages)
        core.shutdown()


@pytest.mark.exhaustive
def test_two_ranks_draft_alike(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    options = {"tensor_parallel_size": 2, "cache_dir": tmp_path / "cache"}
    plain, _ = run(folder, greedy_requests(), None)
    drafted, stats = run(folder, greedy_requests(), speculation(folder), **options)
    assert tokens_of(drafted) == tokens_of(plain)
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 40

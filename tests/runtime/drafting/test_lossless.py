"""Speculation changes no token: greedy or drawn, with every option that looks at logits, preempted, cached or structured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, RequestOutput
from tests.support.drafters import check_every_draft, use_oracle
from tests.support.engines import VOCAB_SIZE, mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def hard_requests() -> list[EngineRequest]:
    """`mixed_requests`, and options whose rows depend on the drafts before them."""
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7, "presence_penalty": 1.0, "frequency_penalty": 0.8, "max_tokens": 60},
        {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.5, "max_tokens": 60, "logprobs": 3},
        {"min_tokens": 20, "max_tokens": 40, "logprobs": 0},
        {"temperature": 1.0, "seed": 10, "allowed_token_ids": [1, 3, 5, 7], "max_tokens": 50,
         "bad_words_token_ids": [[1, 3], [3, 5, 7], [5, 5, 5, 1, 3], [7]]},
        {"temperature": 1.0, "seed": 11, "allowed_token_ids": [1, 3, 5, 7], "max_tokens": 50, "presence_penalty": 2.0,
         "bad_words_token_ids": [[1, 1], [3, 3]], "min_tokens": 30},
        {"temperature": 1.5, "seed": 12, "max_tokens": 50, "speculate": False},
    ]  # fmt: skip
    more = [request(f"h{i}", prompt_of(i + 3, 5 + 7 * i), eos_token_ids=[11, 1], **given) for i, given in enumerate(options)]
    return mixed_requests() + more


def run(folder: Path, requests: list[EngineRequest], **options: Any) -> tuple[dict[str, list[RequestOutput]], EngineStats]:
    core = EngineCore(tiny_config(folder, max_num_batched_tokens=64, **options))
    outputs = run_requests(core, requests)
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()
    return outputs, stats


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 90}, {"enable_prefix_caching": False}], ids=["roomy", "preempting", "uncached"])
def test_drafts_change_nothing(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    requests = hard_requests()
    plain, _ = run(folder, requests)
    drafter = use_oracle(monkeypatch, requests, tokens_of(plain), VOCAB_SIZE)
    drafted, stats = run(folder, requests, speculative_config=DRAFTS, **options)
    assert tokens_of(drafted) == tokens_of(plain)
    for name, steps in drafted.items():
        assert steps[-1].finish_reason == plain[name][-1].finish_reason
        entries, expected = ([entry for one in given for entry in one.new_logprobs or []] for given in (steps, plain[name]))
        assert [entry.ids for entry in entries] == [entry.ids for entry in expected]
        for entry, other in zip(entries, expected, strict=True):
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert stats.spec_decode_num_accepted_tokens > 150
    assert stats.spec_decode_num_draft_tokens - stats.spec_decode_num_accepted_tokens > 50
    per_place = stats.spec_decode_num_accepted_tokens_per_pos
    assert sum(per_place) == stats.spec_decode_num_accepted_tokens
    assert per_place == sorted(per_place, reverse=True)
    counted = [(one.num_draft_tokens, one.num_accepted_drafts) for steps in drafted.values() for one in steps]
    assert sum(drafts for drafts, _ in counted) == stats.spec_decode_num_draft_tokens
    assert not any(one.num_draft_tokens for one in drafted["h5"])  # it opted out
    assert sorted(drafter.forgotten) == sorted(drafted)
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in options)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_methods_draft_what_repeats(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    # One allowed token more than nothing: the output repeats soon.
    requests = [request(f"r{i}", prompt_of(i, 12), max_tokens=80, allowed_token_ids=[3, 4 + i], repetition_penalty=1.05) for i in range(4)]
    plain, _ = run(folder, requests)
    drafted, stats = run(folder, requests, speculative_config={"method": method, "num_speculative_tokens": 4})
    assert tokens_of(drafted) == tokens_of(plain)
    assert stats.spec_decode_num_accepted_tokens > 100


def test_a_prompt_finds_the_prefix_that_drafted_output_has_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = request("a", prompt_of(1, 10), max_tokens=40)
    plain, _ = run(folder, [first])
    answer = tokens_of(plain)["a"]
    follow_up = request("b", prompt_of(1, 10) + answer + [5], max_tokens=20)
    expected, _ = run(folder, [follow_up])
    use_oracle(monkeypatch, [first, follow_up], tokens_of(plain) | tokens_of(expected), VOCAB_SIZE)
    core = EngineCore(tiny_config(folder, speculative_config=DRAFTS))
    assert tokens_of(run_requests(core, [first]))["a"] == answer
    outputs = run_requests(core, [follow_up])
    assert outputs["b"][0].num_cached_tokens == 48  # of 51; the last sampled token of the first request was never computed
    assert tokens_of(outputs) == tokens_of(expected)
    assert core.stats().spec_decode_num_accepted_tokens > 20
    core.shutdown()


def test_at_a_large_batch_drafting_is_off_and_tokens_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(f"r{i}", prompt_of(i, 12), max_tokens=8 + 6 * i) for i in range(6)]
    plain, _ = run(folder, requests)
    drafts: list[int] = []
    given = Speculator.drafts

    def counted(self: Speculator, sequences: Any, num_decodes: int) -> dict[str, list[int]]:
        drafts.append(num_decodes)
        return given(self, sequences, num_decodes)

    monkeypatch.setattr(Speculator, "drafts", counted)
    config = DRAFTS | {"disable_by_batch_size": 3}
    for is_asynchronous in (True, False):
        drafted, _ = run(folder, requests, speculative_config=config, async_scheduling=is_asynchronous)
        assert tokens_of(drafted) == tokens_of(plain)
    assert drafts
    assert max(drafts) == 2


def test_synthetic_acceptance_has_the_rate_that_was_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    requests = [request(f"r{i}", prompt_of(i, 12), max_tokens=150) for i in range(8)]
    config = {"method": "ngram", "num_speculative_tokens": 4, "synthetic_acceptance_rate": 0.8}
    outputs, stats = run(folder, requests, speculative_config=config)
    assert all(len(tokens) == 150 for tokens in tokens_of(outputs).values())
    per_draft = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_drafts
    assert per_draft == pytest.approx(0.8 + 0.8**2 + 0.8**3 + 0.8**4, rel=0.08)  # about 350 drafts
    again, _ = run(folder, requests, speculative_config=config)
    assert tokens_of(again) == tokens_of(outputs)

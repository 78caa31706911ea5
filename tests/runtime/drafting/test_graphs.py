"""Steps in which all sequences have as many draft tokens run in captured graphs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.custom_ops.step import TokenBatch
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner.base_batch import BatchLayout
from compile_and_serve.runtime.runner.input_batch import InputBatch
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from tests.support.drafters import capture_all, check_every_draft, use_fake_graphs, use_oracle
from tests.support.engines import VOCAB_SIZE, mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

K = 4
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafted_steps_replay_their_graphs(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    folder = write_tiny_model(tmp_path / "tiny")
    requests = [*mixed_requests()[:4], *(request(f"x{i}", prompt_of(i, 6), max_tokens=30 + 9 * i) for i in range(3))]
    plain = EngineCore(tiny_config(folder, max_num_seqs=8))
    expected = tokens_of(run_requests(plain, requests))
    plain.shutdown()
    made = use_fake_graphs(monkeypatch, K)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "ngram":
        use_oracle(monkeypatch, requests, expected, VOCAB_SIZE)
    else:
        check_every_draft(monkeypatch)
        config["model"] = str(folder)
    core = EngineCore(tiny_config(folder, max_num_seqs=8, speculative_config=config))
    capture_all(made[0])
    assert tokens_of(run_requests(core, requests)) == expected
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens > 40
    assert made[0].stats.replays["full"] > 8
    assert (made[0].stats.replays.get("draft", 0) > 15) == (method == "draft_model")
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


def test_steps_of_the_same_sequences_reuse_their_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    folder = write_tiny_model(tmp_path / "tiny")
    requests = [request(f"r{i}", prompt_of(i, 6), max_tokens=60, **options) for i, options in enumerate(OPTIONS)]
    plain = EngineCore(tiny_config(folder, max_num_seqs=8))
    expected = tokens_of(run_requests(plain, requests))
    plain.shutdown()
    made = use_fake_graphs(monkeypatch, K)
    use_oracle(monkeypatch, requests, expected, VOCAB_SIZE)
    config = {"method": "ngram", "num_speculative_tokens": K}
    core = EngineCore(tiny_config(folder, max_num_seqs=8, speculative_config=config))
    capture_all(made[0])
    laid: list[int] = []
    lay = InputBatch._lay_drafted

    def lay_drafted(self: InputBatch, layout: BatchLayout, buffers: StepBuffers, *, is_ahead: bool) -> TokenBatch:
        laid.append(layout.version)
        return lay(self, layout, buffers, is_ahead=is_ahead)

    monkeypatch.setattr(InputBatch, "_lay_drafted", lay_drafted)
    assert tokens_of(run_requests(core, requests)) == expected
    assert len(laid) > 15
    assert len(set(laid)) <= len(laid) // 2
    core.shutdown()

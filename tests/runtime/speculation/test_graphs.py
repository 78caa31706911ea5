"""Steps in which all sequences have as many draft tokens run in captured graphs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner.decode_step import begin_step
from tests.support.drafters import check_every_draft, use_oracle
from tests.support.engines import (
    VOCAB_SIZE,
    mixed_requests,
    prompt_of,
    request,
    run_requests,
    tiny_config,
    tokens_of,
    write_tiny_model,
)
from tests.support.fake_graphs import FakeDevice

K = 4


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafted_steps_replay_their_graphs(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    folder = write_tiny_model(tmp_path / "tiny")
    requests = [*mixed_requests()[:4], *(request(f"x{i}", prompt_of(i, 6), max_tokens=30 + 9 * i) for i in range(3))]
    plain = EngineCore(tiny_config(folder, max_num_seqs=8))
    expected = tokens_of(run_requests(plain, requests))
    plain.shutdown()
    made: list[GraphRunners] = []

    def graph_runners(config: Any, spec: Any, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
        stats = GraphStats()
        given: dict[str, Any] = {
            "mode": "full", "max_num_seqs": 8, "backends": [], "device": FakeDevice(), "decode_head": begin_step, "stats": stats,
        }  # fmt: skip
        # Sampling stays outside: Triton's kernels would run in the interpreter.
        runner = CudaGraphRunner(plans[0], sizes=(8,), **given)
        drafted = CudaGraphRunner(plans[0], sizes=(1, 2, 4, 8), query_len=1 + K, **given)
        made.append(GraphRunners([runner], drafted))
        return made[0]

    monkeypatch.setattr("compile_and_serve.runtime.runner.worker.make_graph_runners", graph_runners)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "ngram":
        use_oracle(monkeypatch, requests, expected, VOCAB_SIZE)
    else:
        check_every_draft(monkeypatch)
        config["model"] = str(folder)
    core = EngineCore(tiny_config(folder, max_num_seqs=8, speculative_config=config))
    drafted = made[0].drafted
    assert drafted is not None
    while drafted.capture_next():
        pass
    assert tokens_of(run_requests(core, requests)) == expected
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens > 40
    assert made[0].stats.replays["full"] > 10
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()

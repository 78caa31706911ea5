"""`benchmarks.replicas`: a replica that is slow is told from one that stands still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.replicas import main, of_replica, of_requests
from compile_and_serve.runtime.messages import EngineStats, RequestOutput, StepOutputs
from tests.support.engines import write_tiny_model
from tests.support.fake_worker import use_fake_workers


def step(replica: int, tokens: int, *ids: str, ends: bool = False) -> StepOutputs:
    outputs = [RequestOutput(request_id=name, finish_reason="length" if ends else None) for name in ids]
    return StepOutputs(outputs=outputs, stats=EngineStats(step_tokens=tokens), replica=replica)


def test_times_of_requests_and_of_replicas() -> None:
    arrivals = [
        (1.0, step(0, 8, "a")),
        (1.5, step(1, 8, "b")),
        (2.0, step(0, 1, "a")),
        (3.5, step(1, 9, "b")),  # of another prompt too
        (4.0, step(1, 1, "b", ends=True)),
        (7.0, step(0, 1, "a", ends=True)),
        (7.5, StepOutputs(stats=EngineStats(), replica=0)),
    ]
    seen = of_requests(arrivals, prompt=8, new=3)
    assert seen["tok_s"] == pytest.approx(2 * 11 / 7.5, abs=0.1)
    assert seen["ttft_s"] == {"p50": 1.5, "p99": 1.5}
    assert seen["tpot_ms"] == {"p50": 3000.0, "p99": 3000.0}
    assert seen["gap_max_s"] == 5.0
    first, second = (of_replica(arrivals, replica) for replica in range(2))
    assert (first["requests"], first["steps"], first["decode_ms"], first["slowest_ms"]) == (1, 3, 3000.0, 5000.0)
    assert (second["decode_ms"], second["slowest_ms"]) == (500.0, 2000.0)
    assert of_replica(arrivals, 2) == {"requests": 0}


def test_rows_of_one_and_of_two_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    use_fake_workers(monkeypatch, model, pause=0.002)
    main([str(model), *"--replicas 1 2 --requests 4 --prompt 20 --new 6 --runs 2 --device cpu".split()])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["replicas"], row["nth"]) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [sum(one["requests"] for one in row["by_replica"]) for row in rows] == [4, 4, 8, 8]
    # How many each replica got, and how far apart outputs came, depends on how busy this machine is.
    assert all(one["requests"] >= 1 and one["decode_ms"] > 0 for row in rows for one in row["by_replica"])
    assert rows[0]["scaling"] == rows[1]["scaling"] == 1.0

"""`benchmarks.lora`: which steps count while adapters are loaded."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.lora import loading, main
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, RequestOutput, StepOutputs


class FakeCore:
    """Each adapter takes a call that completes no step, a decode step, a step with the prompt, and a last one."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(max_model_len=64)
        self.executor = None
        self.requests: list[EngineRequest] = []
        self.num_aborted = 0
        self._idle_tasks, self._script = 2, list[tuple[float, int, bool]]()

    def idle(self) -> bool:
        assert not self.requests, "graphs are captured before requests run"
        self._idle_tasks -= 1
        return self._idle_tasks >= 0

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)
        if request.lora is not None:
            slow = 0.05 if request.lora.lora_int_id == 1 else 0.0  # the first, which does not count
            self._script = [(0.02, 0, False), (0.01 + slow, 3, False), (0.03 + slow, 19, False), (0.01, 4, True)]

    def step(self) -> StepOutputs:
        seconds, tokens, ends = self._script.pop(0)
        time.sleep(seconds)
        outputs = [RequestOutput(request_id="joins", finish_reason="length" if ends else None)] if tokens > 3 else []
        return StepOutputs(outputs=outputs, stats=EngineStats(step_tokens=tokens))

    def stats(self) -> EngineStats:
        return EngineStats(num_running=3)

    def abort(self, request_ids: list[str]) -> None:
        self.num_aborted = len(request_ids)

    def has_work(self) -> bool:
        return False


def test_steps_last_from_end_to_end_and_the_first_adapter_does_not_count() -> None:
    core = FakeCore()
    llm: Any = SimpleNamespace(core=core)
    row = loading(llm, 4, [LoRARequest(str(i), i, "") for i in (1, 2, 3)])
    assert row["steps"] == 6  # three of each adapter but the first: a call without a step is part of the next step
    assert 20 <= row["median_ms"] < 50  # 10, 30 and 30: 20 without a step and 10 with one
    assert 30 <= row["longest_ms"] < 60
    assert row["captured"] == row["compiled"] == 0
    base = [request for request in core.requests if request.lora is None]
    assert core.num_aborted == len(base) == 3
    assert {len(one.prompt_token_ids) + (one.sampling_params.max_tokens or 0) for one in base} == {64}


def test_a_request_must_have_others_to_join(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["lora", "model", "--cases", "1:1", "--loading", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "2 or more sequences" in capsys.readouterr().err

"""What a worker does before the first request."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from compile_and_serve.runtime.distributed.in_process_executor import InProcessExecutor
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from tests.support.engines import tiny_config, write_tiny_model


def test_ranges_of_token_counts_without_a_choice_of_kernels_are_run_before_serving_or_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    ran: list[int] = []
    warm_up = ModelRunner.warm_up

    def counts(device: torch.device, max_tokens: int) -> tuple[int, ...]:
        asked.append(device)
        assert ran, "what has not run yet has asked for nothing"
        return (5, max_tokens)

    def recorded(self: ModelRunner, num_tokens: int, num_seqs: int) -> None:
        ran.append(num_tokens)
        warm_up(self, num_tokens, num_seqs)

    monkeypatch.setattr("compile_and_serve.runtime.runner.worker.unmeasured_token_counts", counts)
    monkeypatch.setattr(ModelRunner, "warm_up", recorded)
    config = tiny_config(write_tiny_model(tmp_path))
    executor = InProcessExecutor(config, lambda *_: None)
    assert asked == [torch.device("cpu")]
    assert ran[-1] == 5  # what decodes need at once, the rest when there is time
    assert executor.idle()
    assert ran[-2:] == [5, max(config.scheduler.token_budget, config.scheduler.max_num_seqs)]
    assert not executor.idle()


def test_the_kernels_are_asked_for_before_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Read(Exception):
        pass

    def read(path: Path) -> None:
        assert asked.wait(60)
        raise Read

    asked = threading.Event()
    monkeypatch.setattr("compile_and_serve.runtime.runner.worker.load_cpu_kernels", asked.set)
    monkeypatch.setattr("compile_and_serve.runtime.runner.worker.read_config", read)
    with pytest.raises(Read):
        InProcessExecutor(tiny_config(write_tiny_model(tmp_path)), lambda *_: None)

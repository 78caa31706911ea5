"""What a worker does before the first request."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.model import StepModel
from compile_and_serve.custom_ops.tuning.token_ranges import token_ranges
from compile_and_serve.runtime.config import EngineConfig, ModelConfig
from compile_and_serve.runtime.distributed.in_process_executor import InProcessExecutor
from compile_and_serve.runtime.runner import warm_up
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.fake_graphs import FakeDevice


def test_ranges_of_token_counts_without_a_choice_of_kernels_are_run_before_serving_or_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    ran: list[int] = []
    run = warm_up.run_dummy_step

    def counts(device: torch.device, max_tokens: int) -> tuple[int, ...]:
        asked.append(device)
        assert ran, "what has not run yet has asked for nothing"
        return (5, max_tokens)

    def recorded(runner: ModelRunner, num_tokens: int, num_seqs: int) -> None:
        ran.append(num_tokens)
        run(runner, num_tokens, num_seqs)

    monkeypatch.setattr("compile_and_serve.runtime.runner.warm_up.unmeasured_token_counts", counts)
    monkeypatch.setattr(warm_up, "run_dummy_step", recorded)
    config = tiny_config(write_tiny_model(tmp_path))
    executor = InProcessExecutor(config, lambda *_: None)
    assert asked == [torch.device("cpu")]
    assert ran[-1] == 5  # what decodes need at once, the rest when there is time
    assert executor.stats().pending_work == {"choices": 1}
    assert not executor.idle(requests_wait=True)  # measuring would delay them
    assert ran[-1] == 5
    assert executor.idle()
    assert executor.stats().pending_work == {}
    assert ran[-2:] == [5, max(config.scheduler.token_budget, config.scheduler.max_num_seqs)]
    assert not executor.idle()


def test_nothing_is_left_for_idle_moments_where_all_is_to_be_captured_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.runtime.runner.warm_up.unmeasured_token_counts", lambda *_: (5, 40, 70))
    config = tiny_config(write_tiny_model(tmp_path))
    stages: list[str] = []
    config = replace(config, compile=replace(config.compile, capture="all"))
    executor = InProcessExecutor(config, lambda stage, *_: stages.append(stage))
    assert stages[-1] == "capture all"
    assert not executor.idle()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraphRunner]:
    """The runners of CUDA graphs that workers make, of stand-ins for graphs."""
    made: list[CudaGraphRunner] = []

    def fake_graphs(config: EngineConfig, _: object, plans: list[StepModel], *__: object, **___: object) -> GraphRunners:
        runner = CudaGraphRunner(
            plans[0],
            mode="full",
            max_num_seqs=config.scheduler.max_num_seqs,
            backends=[],
            device=FakeDevice(),
            decode_head=begin_step,
            decode_tail=end_step,
        )
        made.append(runner)
        return GraphRunners([runner])

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", fake_graphs)
    return made


@pytest.mark.slow
def test_all_graphs_are_captured_before_the_first_step_and_again_when_the_worker_wakes(tmp_path: Path, made: list[CudaGraphRunner]) -> None:
    config = tiny_config(write_tiny_model(tmp_path), max_num_seqs=33)  # 1, 2, 4, 8, 16, 24, 32 and 33
    assert warm_up.CAPTURED_AT_START < 8
    executor = InProcessExecutor(replace(config, compile=replace(config.compile, capture="all")), lambda *_: None)
    assert made[-1].report()["full_graphs"] == 8
    executor.sleep(1)
    executor.wake_up(weights=True, kv_cache=True)
    assert len(made) == 2
    assert made[-1].report()["full_graphs"] == 8


@pytest.mark.slow
def test_libraries_of_kernels_that_are_built_meanwhile_are_used_when_the_worker_is_idle(
    tmp_path: Path, made: list[CudaGraphRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, running, ran = ["products"], [1], []
    monkeypatch.setattr(warm_up, "num_running", lambda: sum(running))
    monkeypatch.setattr(warm_up, "num_building", lambda: sum(running))
    monkeypatch.setattr(warm_up, "num_built_libraries", lambda: len(built))
    monkeypatch.setattr(warm_up, "use_built_libraries", lambda: [built.pop()])
    config = tiny_config(write_tiny_model(tmp_path), max_num_seqs=33)
    executor = InProcessExecutor(config, lambda *_: None)
    while executor.idle():
        pass
    assert executor.stats().pending_work == {"builds": 2}
    [graphs], captures = made, made[0].stats.capture_seconds
    run = warm_up.run_dummy_step

    def recorded(runner: ModelRunner, num_tokens: int, num_seqs: int) -> None:
        ran.append(num_tokens)
        run(runner, num_tokens, num_seqs)

    monkeypatch.setattr(warm_up, "run_dummy_step", recorded)
    running.clear()
    while executor.idle():
        pass
    assert ran == token_ranges(max(config.scheduler.token_budget, config.scheduler.max_num_seqs))
    assert executor.stats().pending_work == {}
    assert graphs.report()["full_graphs"] == 8
    assert graphs.stats.capture_seconds == 2 * captures


def test_the_kernels_are_asked_for_before_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Read(Exception):
        pass

    def read(model: ModelConfig) -> None:
        assert asked.wait(60)
        raise Read

    asked = threading.Event()
    monkeypatch.setattr("compile_and_serve.custom_ops.jit.cpu_kernels.load_cpu_kernels", asked.set)
    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.read_model_config", read)
    with pytest.raises(Read):
        InProcessExecutor(tiny_config(write_tiny_model(tmp_path)), lambda *_: None)

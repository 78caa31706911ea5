"""What layers cost is measured once on a device, and then known to all starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pieces.stages import choose_stages, cost_keys
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.in_process_executor import InProcessExecutor
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner import stage_costs
from compile_and_serve.runtime.runner.stage_costs import StageCosts, measures_stages
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.staged_engine import use_plain_pieces

CPU = torch.device("cpu")


def test_the_first_start_measures_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_pieces(monkeypatch)
    folder = write_tiny_model(tmp_path / "model")
    monkeypatch.setattr(stage_costs, "gather_objects", lambda mine: [mine])
    core = EngineCore(tiny_config(folder, enforce_eager=False, use_cache=False))
    assert isinstance(core.executor, InProcessExecutor)
    worker = core.executor.worker
    model, config = worker.loaded.model, tiny_config(folder, enforce_eager=False, pipeline_parallel_size=2, cache_dir=tmp_path)
    assert isinstance(model, CompiledModel)
    costs = StageCosts(config, CPU)
    assert costs.seconds == {}
    costs.measure(worker.runner, model)
    keys = cost_keys(model.plan, model.state)
    assert costs.seconds.keys() == set(keys)
    assert len(keys) > len(costs.seconds) > 2  # layers are alike
    assert min(costs.seconds.values()) > 0

    later = StageCosts(config, CPU)
    assert later.seconds == costs.seconds
    monkeypatch.delattr(stage_costs, "time_steps")  # nothing is measured again
    later.measure(worker.runner, model)
    stages = choose_stages(model.plan, None, model.state, 2, seconds=later.seconds)
    assert stages.by == "measured time"
    halves = [stages.stage(model.plan, None, index)[0].plan for index in range(2)]
    assert {key for half in halves for key in cost_keys(half, stages.held(half))} == set(keys)  # as a stage names them
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pipeline_parallel_size": 2}, True),
        ({}, False),
        ({"pipeline_parallel_size": 2, "use_cache": False}, False),
        ({"pipeline_parallel_size": 2, "pipeline_parallel_layers": [1, 1]}, False),
    ],
)
def test_nothing_is_measured_where_nothing_is_kept_or_the_user_cuts(tmp_path: Path, options: dict[str, Any], expected: bool) -> None:
    config: EngineConfig = tiny_config(write_tiny_model(tmp_path), **({"enforce_eager": False, "use_cache": True} | options))
    assert measures_stages(config) == expected

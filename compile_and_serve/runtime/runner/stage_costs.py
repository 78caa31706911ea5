"""What the steps of a plan cost on this device. The first start of a model in stages measures it, and later starts cut by it."""

from __future__ import annotations

import logging

import torch

from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pieces.stages import cost_keys
from compile_and_serve.compiler.reports.step_times import time_steps
from compile_and_serve.custom_ops.collectives.collectives import gather_objects
from compile_and_serve.custom_ops.tuning.store import MeasurementStore, tuning_folder
from compile_and_serve.custom_ops.tuning.tuner import device_name, tuning_off
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.runner.base_runner import BaseRunner
from compile_and_serve.runtime.runner.warm_up import make_step_of

logger = logging.getLogger(__name__)

CONTEXT = 512  # cached tokens of a decode
MAX_DECODES, MAX_TOKENS = 256, 1024
RUNS = 5


def measures_stages(config: EngineConfig) -> bool:
    """Whether the model is cut by what its steps cost: not by hand, nor where nothing is kept."""
    return config.mesh.pipe > 1 and config.compile.pipeline_parallel_layers is None and config.compile.use_cache


class StageCosts:
    """Seconds by `cost_keys`, each of a step of decodes and of one with as many decodes and a prompt. All ranks call the same methods."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._num_decodes = max(1, min(MAX_DECODES, config.scheduler.max_num_seqs // config.mesh.pipe))
        self._num_tokens = min(MAX_TOKENS, config.scheduler.token_budget)
        self._problem = f"{self._num_decodes} decodes, {self._num_tokens} tokens"
        self._store = MeasurementStore(tuning_folder(config.compile.cache_dir), "layers", device_name(device))
        # Ranks of several hosts may know different ones, but must make the same cuts.
        self.seconds: dict[str, float] = gather_objects(self._store.get(self._problem) or {})[0]

    def measure(self, runner: BaseRunner, model: CompiledModel) -> None:
        """Measure this stage's steps, if any rank's are unknown, and keep those of all."""
        keys = cost_keys(model.plan, model.state)
        if not any(gather_objects(any(key not in self.seconds for key in keys))):
            return
        context = min(CONTEXT, runner.max_model_len // 2)
        decodes, prompt = [(context, 1)] * self._num_decodes, min(self._num_tokens - self._num_decodes, runner.max_model_len)
        measured: dict[str, float] = {}
        with tuning_off():
            times = [time_steps(model, make_step_of(runner, decodes), RUNS)]
            if prompt > 0:
                times.append(time_steps(model, make_step_of(runner, [*decodes[1:], (0, prompt)]), RUNS))
        for key, *seconds in zip(keys, *times, strict=True):
            measured[key] = min(measured.get(key, float("inf")), sum(seconds))
        for others in gather_objects(measured):
            self.seconds |= others
        self._store.put(self._problem, self.seconds)
        logger.debug("The time of the plan's %d steps is kept; the next start cuts the model by it.", len(keys))

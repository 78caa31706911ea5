"""Choose the executor that the options ask for."""

from __future__ import annotations

from compile_and_serve.custom_ops.platforms.cuda_context import start_cuda
from compile_and_serve.garbage import no_garbage_collection
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.executor import Executor
from compile_and_serve.runtime.distributed.hosts import HostRanks
from compile_and_serve.runtime.distributed.local_ranks import LocalRanks
from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor
from compile_and_serve.runtime.distributed.ray_ranks import RayRanks
from compile_and_serve.runtime.messages import StageCallback, ignore_stage


def make_executor(config: EngineConfig, on_stage: StageCallback) -> Executor:
    """Make the executor that the options ask for, with its ranks ready for steps.

    on_stage: reports the start-up of rank 0. Raises `ValueError` or `RankFailedError` when a rank cannot start.
    """
    parallel = config.parallel
    if parallel.executor is None and config.mesh.size == 1:
        start_cuda(config.device, parallel.device_index)
        with no_garbage_collection(stays=True):
            # Imports torch, which an engine process beside its ranks does not need.
            from compile_and_serve.runtime.distributed.in_process_executor import InProcessExecutor

        return InProcessExecutor(config, on_stage)
    if parallel.executor == "ray":
        return DistributedExecutor(config, RayRanks(config), on_stage)
    if parallel.num_hosts > 1:
        return DistributedExecutor(config, HostRanks(config), on_stage)
    return DistributedExecutor(config, _local_ranks(config), on_stage)


def stage_executor(config: EngineConfig, num_before: int) -> DistributedExecutor:
    """Start ranks beside `num_before` ranks that they are to replace, up to where they must join: see `DistributedExecutor`."""
    return DistributedExecutor(config, _local_ranks(config), ignore_stage, num_before=num_before)


def _local_ranks(config: EngineConfig) -> LocalRanks:
    return LocalRanks(config.device, config.parallel.data_parallel_rank * config.mesh.size, config.compile.work_dir)

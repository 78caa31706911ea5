"""`Executor`: where steps run. The engine core speaks to it in ranks and stages, never of the GPUs of one box.

A model is cut into pipeline stages, each of which runs on one rank or on several that share its tensors. Every rank
gets every step's `SchedulerOutput`, in order; the last stage's first rank answers with what was sampled.

One rank lives in the engine's process. Several are processes of their own, all of them: the engine is then never inside
a collective that waits for a rank which is gone, so it can always say what happened, and ranks on other hosts are no
special case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.scheduler.step_messages import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
    WorkerStats,
)

if TYPE_CHECKING:
    from compile_and_serve.runtime.runner.model_runner import ModelRunner
    from compile_and_serve.runtime.runner.worker import Worker

StageCallback = Callable[[str, float, str], None]


# Stages that one process alone goes through when all share an artifact store: whichever is first, while the others wait.
_OFTEN_ONCE = frozenset({"capture", "passes", "split", "compile"})


def stages_of_another(on_stage: StageCallback, who: str) -> StageCallback:
    """For a process beside the one whose start-up `on_stage` hears of: what it may do for all, with its name."""

    def on_its_stage(stage: str, seconds: float, detail: str) -> None:
        if stage in _OFTEN_ONCE:
            on_stage(stage, seconds, f"{detail} ({who})")

    return on_its_stage


class RankFailedError(RuntimeError):
    """A rank is gone, or its step failed; the message is one sentence that names the rank."""


class StepHandle(Protocol):
    """A launched step."""

    step: int


class Executor(Protocol):
    """Runs steps on num_ranks ranks in num_stages stages. Steps are launched in order, and their results taken in
    that order. info: what all ranks have in common; its num_blocks is the number of KV blocks that each has.
    """

    num_ranks: int
    num_stages: int
    info: WorkerInfo

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step on every rank, without waiting for it where the device allows."""
        ...

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for the oldest launched step; raises what the rank raised, or `RankFailedError`."""
        ...

    def idle(self) -> bool:
        """Have every rank do one piece of work that can wait; False when there is none. Nothing may be in flight.
        Raises `RankFailedError` for a rank that is gone.
        """
        ...

    def stats(self) -> WorkerStats:
        """The answering rank's counters, as far as results were taken."""
        ...

    def shutdown(self) -> None:
        """Let go of every rank. May be called more than once."""
        ...


class InProcessExecutor:
    """One rank, one stage: a worker in this process. Construction raises as `Worker` does."""

    num_ranks = 1
    num_stages = 1

    def __init__(self, config: EngineConfig, on_stage: StageCallback) -> None:
        from compile_and_serve.runtime.runner.worker import Worker

        worker = Worker(config, Rank(device_index=config.parallel.device_index), on_stage)
        worker.start(worker.info.num_blocks)
        self.info = worker.info
        self._worker: Worker | None = worker

    @property
    def worker(self) -> Worker:
        """The rank itself."""
        assert self._worker is not None, "the executor is shut down"
        return self._worker

    @property
    def runner(self) -> ModelRunner:
        """The rank's model runner."""
        return self.worker.runner

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step. On the CPU it is over when this returns."""
        return self.worker.launch(scheduled)

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for a launched step."""
        return handle.result()  # type: ignore[attr-defined]

    def idle(self) -> bool:
        """Capture one more graph."""
        return self.worker.idle()

    def stats(self) -> WorkerStats:
        """Counters after the last launched step."""
        return self.worker.stats()

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        self._worker = None


def make_executor(config: EngineConfig, on_stage: StageCallback) -> Executor:
    """The executor that the options ask for, its ranks ready for steps. on_stage hears of the first rank's start-up."""
    parallel = config.parallel
    if parallel.executor is None and config.num_ranks == 1:
        return InProcessExecutor(config, on_stage)
    from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor, LocalRanks

    if parallel.executor == "ray":
        from compile_and_serve.runtime.distributed.ray_ranks import RayRanks

        return DistributedExecutor(config, RayRanks(config), on_stage)
    host = LocalRanks(parallel.data_parallel_rank * config.num_ranks, config.compile.work_dir)
    return DistributedExecutor(config, host, on_stage)

"""`Executor`: where steps run. The engine core speaks to it in ranks and stages, never of the GPUs of one box.

A model is cut into pipeline stages, each of which runs on one rank or on several that share its tensors. Every rank
gets every step's `SchedulerOutput`, in order; the last stage's first rank answers with what was sampled.
"""

from __future__ import annotations

from typing import Protocol

from runtime.model_runner import ModelRunner, PendingStep
from runtime.schedule import ModelRunnerOutput, SchedulerOutput


class StepHandle(Protocol):
    """A launched step."""

    step: int

    def result(self) -> ModelRunnerOutput:
        """Wait for the step, once; what it sampled."""
        ...


class Executor(Protocol):
    """Runs steps on num_ranks ranks in num_stages stages. Steps are launched in order, and their results taken in
    that order.
    """

    num_ranks: int
    num_stages: int

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step on every rank, without waiting for it where the device allows."""
        ...

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for the oldest launched step; raises what a rank raised."""
        ...

    def failure(self) -> str | None:
        """One sentence about a rank that is gone, else None."""
        ...

    def shutdown(self) -> None:
        """Let go of every rank. May be called more than once."""
        ...


class InProcessExecutor:
    """One rank, one stage: the model runner of this process."""

    num_ranks = 1
    num_stages = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner: ModelRunner | None = runner

    @property
    def runner(self) -> ModelRunner:
        """The rank's model runner."""
        assert self._runner is not None, "the executor is shut down"
        return self._runner

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Start a step. On the CPU it is over when this returns."""
        return self.runner.launch(scheduled)

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for a launched step."""
        return handle.result()

    def failure(self) -> str | None:
        """A rank of this process cannot be gone by itself."""
        return None

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        self._runner = None

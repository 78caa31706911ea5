"""`Executor`: the protocol between the engine core and the ranks that run its steps.

One rank holds the model, or the ranks of a mesh share it. Every rank gets every step's `SchedulerOutput`, in order: that of its data
group. The answering rank of each group sends the sampled tokens.

A single rank lives in the engine's process. If there are several, each is a process of its own. The engine is then never
inside a collective that waits for a dead rank, so it can always report a failure, and ranks on other hosts need no
special case.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo, WorkerStats

# A step of several ranks without any progress is given up after this time. A longer step is unhealthy.
STUCK_SECONDS = 120.0

# When processes share an artifact store, the first to reach one of these stages does the work and the others wait.
_SHARED_STAGES = frozenset({"capture", "passes", "split", "compile"})


def report_shared_stages(on_stage: StageCallback, who: str) -> StageCallback:
    """A callback for a further process: it reports the stages that the process may run for all, marked with `who`."""

    def report(stage: str, seconds: float, detail: str) -> None:
        if stage in _SHARED_STAGES:
            on_stage(stage, seconds, f"{detail} ({who})")

    return report


class RankFailedError(RuntimeError):
    """A rank is gone or its step failed. The message is one sentence that names the rank. rank: its number; None: of several."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class StepHandle(Protocol):
    """A launched step. step: its number."""

    step: int


class Executor(Protocol):
    """Runs steps on the ranks of a mesh.

    Steps are launched in order, and their results are taken in that order. info: what all ranks have in common;
    info.num_blocks is the number of KV blocks that each rank has.
    """

    mesh: Mesh
    info: WorkerInfo

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step on every rank, of `scheduled.groups` each data group's own. Does not wait for it if the device is asynchronous."""
        ...

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for the oldest launched step. Raises what the rank raised, or `RankFailedError`."""
        ...

    def compile_grammar(self, grammar: str, tenant: str = "") -> Future[Any]:
        """Let every rank compile a checked grammar of structured output. The result may raise `ValueError`. tenant: the API key whose
        request it is.
        """
        ...

    def load_adapter(self, adapter: LoRARequest) -> Future[Any]:
        """Let every rank read an adapter into its host memory. Done once all have; the result may raise `AdapterError`."""
        ...

    def poll(self) -> None:
        """End the futures of `load_adapter` whose ranks have answered. No step may be in flight. Raises `RankFailedError`."""
        ...

    def drop_adapter(self, adapter_id: int) -> None:
        """Let every rank free an adapter's host memory."""
        ...

    def idle(self, *, requests_wait: bool = False) -> bool:
        """Run one deferrable task on every rank; False if there was none. No step may be in flight.

        requests_wait: only a task that is worth it to them: the capture of a CUDA graph that is due.
        Raises `RankFailedError` for a rank that is gone.
        """
        ...

    def sleep(self, level: int) -> None:
        """Let every rank free its memory. No step may be in flight. See `Worker.sleep`."""
        ...

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Let every rank bring parts of its memory back. See `Worker.wake_up`."""
        ...

    def profile(self, folder: str) -> None:
        """Let every rank begin a trace, or write it to `folder`: see `Worker.profile`. No step may be in flight. Raises `ValueError`."""
        ...

    def stats(self) -> WorkerStats:
        """Counters of the rank that answers, as of the last result taken."""
        ...

    def shutdown(self) -> None:
        """Release every rank. May be called more than once."""
        ...

"""`InProcessExecutor`: one rank in the engine's process."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from typing import Any

from compile_and_serve.custom_ops.mesh import SINGLE_RANK
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.distributed.executor import StepHandle
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.runner.worker import Worker
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, WorkerStats


class InProcessExecutor:
    """One rank: a worker in this process. Construction raises the errors of `Worker`."""

    mesh = SINGLE_RANK

    def __init__(self, config: EngineConfig, on_stage: StageCallback) -> None:
        worker = Worker(config, Rank(device_index=config.parallel.device_index), on_stage)
        worker.start(worker.info.num_blocks)
        self.info = worker.info
        self._worker: Worker | None = worker

    @property
    def worker(self) -> Worker:
        """The rank."""
        assert self._worker is not None, "the executor is shut down"
        return self._worker

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Start a step. On the CPU it has run when this returns."""
        return self.worker.launch(scheduled)

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for a launched step and return what it sampled."""
        return self.worker.result(handle)  # type: ignore[arg-type]

    def compile_grammar(self, grammar: str, tenant: str = "") -> Future[Any]:
        """Compile a grammar of structured output in a thread."""
        return self.worker.compile_grammar(grammar, tenant)

    def load_adapter(self, adapter: LoRARequest) -> Future[Any]:
        """Read an adapter in a thread."""
        return self.worker.adapters.load(adapter)

    def poll(self) -> None:
        """Nothing: the thread that reads an adapter ends its future."""

    def drop_adapter(self, adapter_id: int) -> None:
        """Free an adapter's host memory."""
        self.worker.adapters.drop(adapter_id)

    def idle(self, *, requests_wait: bool = False) -> bool:
        """Run one deferrable task of the worker; False if there was none."""
        return self.worker.idle(requests_wait=requests_wait)

    def sleep(self, level: int) -> None:
        """Free the rank's memory."""
        self.worker.sleep(level)

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Bring parts of the rank's memory back."""
        self.worker.wake_up(weights=weights, kv_cache=kv_cache)

    def profile(self, folder: str) -> None:
        """Begin a trace, or write it."""
        self.worker.profile(folder)

    def stats(self) -> WorkerStats:
        """Counters after the last launched step."""
        return self.worker.stats()

    def shutdown(self) -> None:
        """Drop the model and its KV cache, and give their memory back to the device: another engine may follow in this process."""
        if self._worker is not None:
            self._worker.close()
            platform, self._worker = self._worker.platform, None
            if not platform.shares_host_memory:
                gc.collect()  # the runner and its graphs refer to each other
                platform.release_cached()

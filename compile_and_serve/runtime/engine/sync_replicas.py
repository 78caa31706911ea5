"""`SyncReplicas`: several replicas with the interface of `SyncEngine`, for `LLM(data_parallel_size=…)`."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.replicas import make_client
from compile_and_serve.runtime.messages import EngineRequest, StageCallback, StepOutputs, UtilityOptions, ignore_stage

T = TypeVar("T")


class SyncReplicas:
    """Replicas as child processes. Their client runs in a thread with an event loop. Construction raises `EngineStartError`."""

    tokens_ahead = 0  # they compute while requests are added

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        self._client = make_client(config, on_stage, restarts=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()
        self._steps: queue.SimpleQueue[StepOutputs | EngineDeadError] = queue.SimpleQueue()
        self._unfinished: set[str] = set()
        self._is_sleeping = False
        try:
            self.info = self._wait(self._client.start())
        except BaseException:
            self._end_loop()
            raise
        self._reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)

    def add_request(self, request: EngineRequest) -> None:
        """Send a request to a replica. One that can never run ends with an output whose `error` says why."""
        self._unfinished.update(request.request_ids)
        self._wait(self._client.add_request(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored. Outputs that are on the way still arrive."""
        ended = list(request_ids)
        self._unfinished.difference_update(ended)
        self._wait(self._client.abort(ended))

    def has_work(self) -> bool:
        """Whether `step` has something to wait for."""
        return bool(self._unfinished)

    def step(self) -> StepOutputs:
        """Wait for the next step of any replica. Raises `EngineDeadError`."""
        step = self._steps.get()
        if isinstance(step, EngineDeadError):
            raise step
        self._unfinished.difference_update(output.request_id for output in step.outputs if output.finish_reason is not None)
        return step

    def sleep(self, level: int) -> None:
        """See `LLM.sleep`."""
        self._is_sleeping = bool(self._wait(self._client.utility("sleep", options={"level": level}))["is_sleeping"])

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See `LLM.wake_up`."""
        options: UtilityOptions = {} if tags is None else {"tags": list(tags)}
        self._is_sleeping = bool(self._wait(self._client.utility("wake_up", options=options))["is_sleeping"])

    @property
    def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return self._is_sleeping

    def shutdown(self) -> None:
        """End the replicas. May be called more than once."""
        if self._thread.is_alive():
            self._wait(self._client.shutdown(drain=False))
            self._reading.cancel()
            self._end_loop()

    async def _read(self) -> None:
        try:
            async for step in self._client.outputs():
                self._steps.put(step)
                if self._client.dead_reason is not None:  # the others live on, but their share of the requests would not be all
                    raise EngineDeadError(self._client.dead_reason)
        except EngineDeadError as error:
            self._steps.put(error)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

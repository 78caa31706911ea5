"""The engine as the API process sees it: `AsyncEngine` sends requests, delivers their deltas and aborts abandoned ones.

`EngineClient` is the interface that `AsyncEngine` needs from a client of the engine process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from compile_and_serve.runtime.engine.client import EngineDeadError
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineInfo, EngineRequest, FinishReason, StepOutputs
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.output_processor import CompletionDelta, OutputProcessor
from compile_and_serve.serve.errors import ApiError, QueueFullError
from compile_and_serve.serve.metrics import Metrics, SequenceClock

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """A connection to an engine process. If the engine is dead, every method raises `EngineDeadError` with one sentence."""

    dead_reason: str | None  # set when the engine or one of its replicas has died

    @property
    def info(self) -> EngineInfo: ...

    async def add_request(self, request: EngineRequest) -> None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def utility(
        self, method: str, adapter: LoRARequest | None = None
    ) -> dict[str, int | float | str | bool | None]: ...

    def outputs(self) -> AsyncIterator[StepOutputs]:
        """Every step's outputs. Ends at shutdown; raises `EngineDeadError` if the engine dies."""
        ...

    def health_problem(self) -> str | None:
        """One sentence if the engine is dead, silent or stuck in a step, else None. Does not wait for the engine."""
        ...

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None: ...


class Generation:
    """All sequences of one HTTP request. `async for deltas in generation` until every sequence is finished."""

    def __init__(self, engine: AsyncEngine, num_sequences: int) -> None:
        self._engine = engine
        self.num_sequences = self._unfinished = num_sequences
        self._deltas: list[CompletionDelta] = []
        self._unread: dict[int, CompletionDelta] = {}  # completion index → the delta in _deltas to extend
        self._waiter: asyncio.Future[None] | None = None
        self.engine_ids: list[str] = []
        self.clocks: dict[int, SequenceClock] = {}

    def put(self, delta: CompletionDelta) -> None:
        """Add a delta. The output processor calls this."""
        self._engine.metrics.observe(self.clocks[delta.index], delta, self._engine.now)
        unread = self._unread.get(delta.index)
        if unread is None or delta.error is not None:  # an error stays separate from the text before it
            self._deltas.append(delta)
            self._unread[delta.index] = delta
        else:
            unread.extend(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self.clocks.pop(delta.index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[CompletionDelta]:
        """The deltas since the last call, at least one: those of several steps are merged into one per completion.

        An error is a delta of its own.
        """
        if not self._deltas:
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        self._unread.clear()
        return deltas

    def close(self) -> None:
        """Abort all unfinished sequences. May be called at any time and more than once."""
        self._engine.release(self)


class AsyncEngine:
    """One engine for many concurrent requests, on one event loop.

    on_death: called once with the reason when the engine dies.
    """

    def __init__(
        self,
        client: EngineClient,
        inputs: InputProcessor,
        metrics: Metrics,
        *,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self.client = client
        self.inputs = inputs
        self.metrics = metrics
        self.now = time.monotonic()
        self.dead_reason: str | None = None
        self.draining = False
        self._processor = OutputProcessor(inputs)
        self._on_death = on_death
        self._reader: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_in_flight(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._processor)

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.dead_reason is None and not self.draining

    def start(self) -> None:
        """Begin to read the engine's outputs. Must be called on the running event loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def submit(
        self,
        request_id: str,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
    ) -> Generation:
        """Send prepared prompts, each with its `SamplingParams`, as one request.

        Completion i of prompt p gets the index p * n + i. Raises `EngineDeadError`, `QueueFullError`, and a 400 for more
        sequences than the server ever accepts at once.
        """
        self.check_accepts(params)
        if self._background:  # aborts must reach the engine before the requests that take the freed places
            await asyncio.wait(set(self._background))
            self.check_accepts(params)
        generation = Generation(self, sum(p.n for p in params))
        first_index = 0
        requests: list[EngineRequest] = []
        try:
            for prompt, prompt_params in zip(prompts, params, strict=True):
                for index in range(first_index, first_index + prompt_params.n):
                    generation.clocks[index] = self.metrics.start(len(prompt))
                added = self._processor.add(
                    request_id,
                    prompt,
                    prompt_params,
                    generation.put,
                    first_index=first_index,
                    priority=priority,
                    cache_salt=cache_salt,
                    lora=lora,
                )
                first_index += prompt_params.n
                generation.engine_ids += added.request_ids
                requests.append(added)
            for request in requests:
                await self.client.add_request(request)
        except BaseException:
            generation.close()
            raise
        return generation

    def release(self, generation: Generation) -> None:
        """Abort a generation's unfinished sequences. Never awaits, because it also runs inside cancelled tasks."""
        unfinished = self._processor.forget(generation.engine_ids)
        if unfinished:
            self.metrics.observe_aborted(list(generation.clocks.values()))
            self._send(self.client.abort(unfinished))

    def cancel_all(self, finish_reason: FinishReason = "abort") -> None:
        """End every request now. Each is answered with the text generated so far."""
        ended = self._processor.end_all(finish_reason)
        if ended:
            self._send(self.client.abort(ended))

    def health_problem(self) -> str | None:
        """One sentence if the engine is dead, silent or stuck in a step, else None. Does not wait for the engine."""
        return self.dead_reason or self.client.health_problem()

    async def shutdown(self, *, drain: bool = True) -> None:
        """Stop the engine and stop reading its outputs."""
        self.draining = True
        try:
            await self.client.shutdown(drain=drain)
        except Exception as error:  # the engine may die during the shutdown
            logger.warning("The engine did not shut down cleanly: %s", error)
        if self._reader is not None:
            self._reader.cancel()
        self._processor.end_all("abort")

    def check_accepts(self, params: Sequence[SamplingParams]) -> None:
        """Raise as `submit` does if a request with these parameters (one per prompt) would be refused now.

        Empty parameters stand for the smallest request.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self.draining:
            raise QueueFullError("The server is shutting down.")
        limit, count = self.client.info.max_in_flight, sum(p.n for p in params) or 1
        if limit is None or self.num_in_flight + count <= limit:
            return
        if count > limit:
            raise ApiError(
                400,
                f"This request has {count} sequences, but the server accepts {limit} at once: send fewer.",
                "n" if params[0].n > 1 else "prompt",
            )
        raise QueueFullError(
            f"{self.num_in_flight} sequences wait or run and this request adds {count}, "
            f"but the server accepts {limit}: try again later."
        )

    async def _read(self) -> None:
        try:
            async for step in self.client.outputs():
                self.now = time.monotonic()
                to_abort = self._processor.process(step.outputs)
                if to_abort:
                    self._send(self.client.abort(to_abort))
                if step.stats is not None:
                    self.metrics.observe_step(step.stats, step.replica)
                if self.client.dead_reason is not None:
                    self._refuse(self.client.dead_reason)  # requests on the other replicas continue
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._die(error)
        else:
            if not self.draining:
                self._die(EngineDeadError("The engine ended its outputs."))

    def _die(self, error: Exception) -> None:
        reason = str(error) or "The engine died."
        self.now = time.monotonic()
        self._processor.end_all("error", error=reason)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Accept no more requests."""
        if self.dead_reason is None:
            self.dead_reason = reason
            logger.error("The engine is dead: %s", reason)
            if self._on_death is not None:
                self._on_death(reason)

    def _send(self, message: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._quietly(message))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _quietly(self, message: Coroutine[Any, Any, None]) -> None:
        try:
            await message
        except EngineDeadError:
            pass  # `_read` sees the death too, with its reason
        except Exception as error:
            self._die(error)

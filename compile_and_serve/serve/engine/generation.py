"""`Generation`: the sequences of one request, from the engine's deltas to its completions, or to the answer if it failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from compile_and_serve.runtime.ledger.records import StepTotals
from compile_and_serve.runtime.messages import ErrorKind, Tenant
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.errors import ApiError, error_body
from compile_and_serve.serve.http.request_scope import current_deadline
from compile_and_serve.serve.http.responses import event
from compile_and_serve.serve.ledger.record import SequenceRecord, current_record
from compile_and_serve.serve.observe.metrics import Metrics, SequenceClock
from compile_and_serve.serve.observe.queue_speed import QueueSpeed
from compile_and_serve.serve.observe.tracing import current_trace
from compile_and_serve.serve.tenants.current import current_tenant
from compile_and_serve.serve.tenants.places import Places

_STATUS: dict[ErrorKind, int] = {"invalid": 400, "overloaded": 503, "limited": 429, "internal": 500, "deadline": 504}


class Engine(Protocol):
    """What a generation uses of its `AsyncEngine`. now, step_totals, output_seconds: of `StepSource`."""

    metrics: Metrics
    places: Places
    speed: QueueSpeed
    now: float
    step_totals: StepTotals
    output_seconds: float
    dead_reason: str | None

    @property
    def num_in_flight(self) -> int: ...

    def call_at(self, when: float, action: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle: ...

    def release(self, generation: Generation) -> None: ...

    def end(self, generation: Generation) -> int: ...

    def retry_after(self) -> int: ...

    def count_tokens(self, tenant: Tenant | None, num_tokens: int) -> None: ...


class Generation:
    """All sequences of one HTTP request. `async for deltas in generation` until every sequence is finished."""

    def __init__(self, engine: Engine, num_sequences: int) -> None:
        self._engine = engine
        self.num_sequences = self._unfinished = num_sequences
        self._deltas: list[CompletionDelta] = []
        self._unread: dict[int, CompletionDelta] = {}  # completion index → the delta in _deltas to extend
        self._waiter: asyncio.Future[None] | None = None
        self.engine_ids: list[str] = []
        self.clocks: dict[int, SequenceClock] = {}
        self.trace = current_trace.get()
        self.record = current_record.get()
        self.sequences: dict[int, SequenceRecord] = {}  # by completion index; of the record, which may have those of other generations
        self._handed_over = 0.0
        self.tenant = current_tenant.get()
        self._timer: asyncio.TimerHandle | None = None
        if (deadline := current_deadline.get()) is not None:
            self._timer = engine.call_at(deadline[0], self._expire, deadline[1])

    def put(self, delta: CompletionDelta) -> None:
        """Add a delta. The output processor calls this."""
        engine, clock = self._engine, self.clocks[delta.index]
        engine.metrics.observe(clock, delta, engine.now)
        if delta.index in self.sequences:
            self.sequences[delta.index].take(delta, engine)
        if self.trace is not None and delta.queue_seconds is not None:
            self.trace.sequence_queued(delta.queue_seconds)
        unread = self._unread.get(delta.index)
        if unread is None or delta.error is not None:  # an error stays separate from the text before it
            self._deltas.append(delta)
            self._unread[delta.index] = delta
        else:
            unread.extend(delta)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self.clocks.pop(delta.index)
            engine.places.remove(self.tenant, 1)
            engine.count_tokens(self.tenant, clock.new_tokens)
            engine.speed.finished(1, engine.now, in_flight=engine.num_in_flight)
            if self.trace is not None:
                self.trace.sequence_finished(clock, delta.finish_reason)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[CompletionDelta]:
        """The deltas since the last call, at least one: those of several steps are merged into one per completion.

        An error is a delta of its own.
        """
        if self._handed_over and self.record is not None:
            self.record.sending += time.monotonic() - self._handed_over
            self._handed_over = 0.0
        if not self._deltas:
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        self._unread.clear()
        self._handed_over = time.monotonic()
        return deltas

    def close(self) -> None:
        """Abort all unfinished sequences. May be called at any time and more than once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._unfinished:
            self._engine.release(self)

    def _expire(self, limit: float) -> None:
        """End the unfinished sequences with an error, because the request's deadline has passed."""
        unfinished = list(self.clocks)
        self._engine.end(self)
        message = f"The request did not end within its limit of {limit:g} seconds."
        for index in unfinished:
            self.put(CompletionDelta(index=index, text="", token_ids=[], finish_reason="error", error=message, error_kind="deadline"))

    def failure(self, delta: CompletionDelta) -> ApiError:
        """The answer to a request that the engine ended with an error."""
        status = 503 if self._engine.dead_reason is not None else _STATUS[delta.error_kind]
        retry_after = self._engine.retry_after() if delta.error_kind in ("overloaded", "limited") else None
        return ApiError(status, delta.error or "", retry_after=retry_after)

    def failure_event(self, delta: CompletionDelta) -> bytes:
        """The error event for a stream that has already begun."""
        failed = self.failure(delta)
        return event(error_body(failed.status, failed.message))

    async def gather(self) -> list[CompletionOutput]:
        """Every completion, once all are finished. Raises the failure of the first that failed."""
        completions = [CompletionOutput(index) for index in range(self.num_sequences)]
        async for deltas in self:
            for delta in deltas:
                completions[delta.index].add(delta)
                if delta.error is not None:
                    raise self.failure(delta)
        return completions

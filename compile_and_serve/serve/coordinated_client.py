"""`CoordinatedClient`: an API process's connection to the engine, which goes through the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from compile_and_serve.runtime.child_process import LINGER_MS
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.heartbeat import SILENCE_SECONDS
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineInfo, EngineRequest, StepOutputs, UtilityOptions
from compile_and_serve.serve.coordinator_messages import (
    Abort,
    ApiFailed,
    ApiReady,
    Call,
    Done,
    EngineGone,
    FromCoordinator,
    Heartbeat,
    MetricFamily,
    ReadMetrics,
    Reply,
    SetAdapter,
    SetSleeping,
    Steps,
    StopServing,
    Submit,
    ToCoordinator,
)
from compile_and_serve.serve.errors import QueueFullError

logger = logging.getLogger(__name__)


class CoordinatedClient:
    """An `EngineClient`. Ids of requests get the process's number as a prefix on the way, since other processes may use the same.

    The handlers are called with the coordinator's messages: on_sleeping, on_adapter, and read_metrics, whose result is sent.
    """

    def __init__(self, process: int, info: EngineInfo, to_address: str, from_address: str) -> None:
        self.info = info
        self.process = process
        self.dead_reason: str | None = None
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.on_sleeping: Callable[[bool], Awaitable[None]] | None = None
        self.on_adapter: Callable[[LoRARequest, bool], None] | None = None
        self.read_metrics: Callable[[], list[MetricFamily]] = list
        self.total_in_flight = 0
        # Only one process counts the engine's steps, so that the sum over the processes is right.
        self.counts_steps = process == 0
        self._prefix = f"{process}:"
        self._context = zmq.asyncio.Context()
        self._to = self._context.socket(zmq.PUSH)
        self._from = self._context.socket(zmq.PULL)
        for socket, address in ((self._to, to_address), (self._from, from_address)):
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.set_hwm(0)
            socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCoordinator)
        self._steps: asyncio.Queue[StepOutputs | None] = asyncio.Queue()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._problem: str | None = None
        self._pulse_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._ended)

    async def add_request(self, request: EngineRequest) -> None:
        """Send a request. With a queue limit, wait for the coordinator's word; raises `QueueFullError` if there is no room."""
        self._check()
        sent = msgspec.structs.replace(
            request,
            request_id=self._prefix + request.request_id,
            siblings=[msgspec.structs.replace(one, request_id=self._prefix + one.request_id) for one in request.siblings],
        )
        if self.info.max_in_flight is None:
            await self._send(Submit(self.process, 0, sent))
        else:
            await self._ask(lambda call_id: Submit(self.process, call_id, sent))

    async def abort(self, request_ids: list[str]) -> None:
        """End requests."""
        self._check()
        await self._send(Abort(self.process, [self._prefix + request_id for request_id in request_ids]))

    async def utility(
        self, method: str, adapter: LoRARequest | None = None, options: UtilityOptions | None = None
    ) -> dict[str, int | float | str | bool | None]:
        """Call a method of the engine. Raises `ValueError` with the engine's sentence."""
        self._check()
        return (await self._ask(lambda call_id: Call(self.process, call_id, method, adapter, options or {}))).value

    async def all_metrics(self) -> list[MetricFamily]:
        """The metrics of all API processes together."""
        return (await self._ask(lambda call_id: Call(self.process, call_id, "metrics"))).metrics

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """Every step's outputs for this process."""
        while (step := await self._steps.get()) is not None:
            yield step
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    def health_problem(self) -> str | None:
        """What the coordinator last said, or one sentence if it is silent."""
        silence = time.monotonic() - self._pulse_at
        if silence > SILENCE_SECONDS:
            return f"The coordinator has been silent for {silence:.0f} seconds."
        return self.dead_reason or self._problem

    async def ready(self) -> None:
        """Tell the coordinator that this process listens."""
        await self._send(ApiReady(self.process))

    async def failed(self, reason: str) -> None:
        """Tell the coordinator that this process cannot start."""
        await self._send(ApiFailed(self.process, reason))

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop reading. The coordinator stops the engine."""
        self._steps.put_nowait(None)

    def close(self) -> None:
        """Close the sockets."""
        self._reader.cancel()
        self._context.destroy(linger=LINGER_MS)

    async def _ask(self, make: Callable[[int], ToCoordinator]) -> Reply:
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(make(call_id))
            reply = await future
        finally:
            self._calls.pop(call_id, None)
        if reply.dead is not None:
            raise EngineDeadError(reply.dead)
        if reply.full is not None:
            raise QueueFullError(reply.full, reply.retry_after)
        if reply.error is not None:
            raise ValueError(reply.error)
        return reply

    async def _send(self, message: ToCoordinator) -> None:
        await self._to.send(self._encoder.encode(message))

    async def _read(self) -> None:
        num_taken, start = 0, len(self._prefix)
        while True:
            message = self._decoder.decode(await self._from.recv())
            if isinstance(message, Steps):
                self.total_in_flight = message.num_in_flight
                for output in message.step.outputs:
                    output.request_id = output.request_id[start:]
                self._steps.put_nowait(message.step)
                num_taken += 1 + len(message.step.outputs)
                if num_taken >= 256:  # `recv` yields only when it must wait: see AsyncEngineClient
                    num_taken = 0
                    await asyncio.sleep(0)
            elif isinstance(message, Reply):
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, Heartbeat):
                self._pulse_at, self._problem = time.monotonic(), message.problem
                self.total_in_flight = message.num_in_flight
            elif isinstance(message, EngineGone):
                self.dead_reason = message.reason
                self._steps.put_nowait(None)
            elif isinstance(message, StopServing):
                self.stop.set()
                if message.hurry:
                    self.hurry.set()
            else:
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A message of the coordinator could not be handled, so the process ends.", exc_info=error)
            self.stop.set()

    async def _answer(self, message: SetSleeping | SetAdapter | ReadMetrics) -> None:
        metrics: list[Any] = []
        if isinstance(message, SetSleeping) and self.on_sleeping is not None:
            await self.on_sleeping(message.is_sleeping)
        elif isinstance(message, SetAdapter) and self.on_adapter is not None:
            self.on_adapter(message.adapter, message.is_loaded)
        elif isinstance(message, ReadMetrics):
            metrics = self.read_metrics()
        await self._send(Done(self.process, message.call_id, metrics))

    def _check(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

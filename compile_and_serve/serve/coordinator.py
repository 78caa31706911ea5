"""`Coordinator`: what several API processes share: the engine, the queue limit, sleeping, adapters, metrics, the throughput line.

Requests and outputs pass through it. It splits a step's outputs by the process that sent the request, whose number begins the
request's id. That costs a small part of what an API process does with an output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from compile_and_serve.runtime.child_process import LINGER_MS
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.heartbeat import HEARTBEAT_SECONDS
from compile_and_serve.runtime.messages import EngineStats, RequestOutput, StepOutputs
from compile_and_serve.serve.coordinator_messages import (
    Abort,
    ApiFailed,
    ApiReady,
    Call,
    Done,
    EngineGone,
    FromCoordinator,
    Heartbeat,
    ReadMetrics,
    Reply,
    SetAdapter,
    SetSleeping,
    Steps,
    Submit,
    ToCoordinator,
)
from compile_and_serve.serve.engine import EngineClient
from compile_and_serve.serve.metrics import sum_families
from compile_and_serve.serve.queue_speed import QueueSpeed
from compile_and_serve.serve.throughput import TokenCounts

logger = logging.getLogger(__name__)


class Coordinator:
    """client: a started engine client. folder: where the sockets lie. `start`, then `close`.

    ready, failed: of the processes, to wait for. gone: set when the engine has died.
    """

    def __init__(self, client: EngineClient, num_processes: int, folder: str) -> None:
        self._client = client
        self.tokens = TokenCounts()
        self.stats: dict[int, EngineStats] = {}
        self.ready = [asyncio.Event() for _ in range(num_processes)]
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.to_address = f"ipc://{folder}/coordinator"
        self.from_addresses = [f"ipc://{folder}/api-{process}" for process in range(num_processes)]
        self._context = zmq.asyncio.Context()
        self._input = self._bind(zmq.PULL, self.to_address)
        self._outputs = [self._bind(zmq.PUSH, address) for address in self.from_addresses]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCoordinator)
        self._in_flight: dict[str, int] = {}  # sequence → prompt tokens that are not counted yet
        self._speed = QueueSpeed()
        self._sleep_lock = asyncio.Lock()
        self._num_calls = 0
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_in_flight(self) -> int:
        """Sequences of all processes that wait or run."""
        return len(self._in_flight)

    def start(self) -> None:
        """Begin to pass messages on."""
        for work in (self._read_processes(), self._read_engine(), self._send_heartbeats()):
            self._spawn(work)

    async def tell(self, message: FromCoordinator) -> None:
        """Send a message to every process."""
        for process in range(len(self._outputs)):
            await self._send(process, message)

    def close(self) -> None:
        """Stop. The owner stops the engine."""
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.set_hwm(0)
        socket.bind(address)
        return socket

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The coordinator failed.", exc_info=error)
            self.gone.set()

    async def _send(self, process: int, message: FromCoordinator) -> None:
        with contextlib.suppress(zmq.Again):  # the process is gone, which its parent sees
            await self._outputs[process].send(self._encoder.encode(message), zmq.NOBLOCK)

    # From the engine

    async def _read_engine(self) -> None:
        reason: str | None = None
        try:
            async for step in self._client.outputs():
                await self._split(step)
                if self._client.dead_reason is not None:
                    reason = self._client.dead_reason
                    break  # another replica may live on, but the server ends
        except EngineDeadError as error:
            reason = str(error)
        await self.tell(EngineGone(reason))
        if reason is not None:
            logger.error("The engine is dead: %s", reason)
            self.gone.set()

    async def _split(self, step: StepOutputs) -> None:
        is_news = False  # for all processes
        if step.stats is not None:
            before = self.stats.get(step.replica)
            is_news = step.stats.to_come != (before.to_come if before is not None else {})
            self.stats[step.replica] = step.stats
        parts: list[list[RequestOutput]] = [[] for _ in self._outputs]
        num_ended = 0
        for output in step.outputs:
            parts[int(output.request_id.partition(":")[0])].append(output)
            if output.new_token_ids and (uncounted := self._in_flight.get(output.request_id)):
                self.tokens.prompt += uncounted
                self._in_flight[output.request_id] = 0
            self.tokens.generation += len(output.new_token_ids)
            if output.finish_reason is not None and self._in_flight.pop(output.request_id, None) is not None:
                num_ended += 1
        if num_ended:
            self._speed.finished(num_ended, time.monotonic(), in_flight=len(self._in_flight))
        for process, part in enumerate(parts):
            if part or process == 0 or is_news:
                own = StepOutputs(outputs=part, stats=step.stats, replica=step.replica)
                await self._send(process, Steps(own, len(self._in_flight)))

    async def _send_heartbeats(self) -> None:
        while True:
            await self.tell(Heartbeat(self._client.health_problem(), len(self._in_flight)))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # From the processes

    async def _read_processes(self) -> None:
        while True:
            message = self._decoder.decode(await self._input.recv())
            if isinstance(message, Submit):
                await self._submit(message)
            elif isinstance(message, Abort):
                await self._abort(message)
            elif isinstance(message, Call):
                self._spawn(self._call(message))
            elif isinstance(message, Done):
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, ApiReady):
                self.ready[message.process].set()
            elif isinstance(message, ApiFailed) and not self.failed.done():
                self.failed.set_result(message.reason)

    async def _submit(self, message: Submit) -> None:
        request, reply = message.request, Reply(message.call_id)
        ids, limit = request.request_ids, self._client.info.max_in_flight
        if limit is not None and len(self._in_flight) + len(ids) > limit:
            refusal = self._speed.refusal(len(ids), limit, time.monotonic(), in_flight=len(self._in_flight))
            reply.full, reply.retry_after = str(refusal), refusal.retry_after
        else:
            self._speed.started(time.monotonic())
            tokens = len(request.prompt_token_ids)
            self._in_flight.update(dict.fromkeys(ids, tokens))
            try:
                await self._client.add_request(request)
            except EngineDeadError as error:
                reply.dead = str(error)
        if message.call_id:
            await self._send(message.process, reply)

    async def _abort(self, message: Abort) -> None:
        ended = [self._in_flight.pop(request_id, None) for request_id in message.request_ids]
        count = sum(one is not None for one in ended)
        self._speed.finished(count, time.monotonic(), in_flight=len(self._in_flight))
        with contextlib.suppress(EngineDeadError):  # `_read_engine` sees it too
            await self._client.abort(message.request_ids)

    async def _call(self, call: Call) -> None:
        reply = Reply(call.call_id)
        try:
            if call.method == "metrics":
                reply.metrics = sum_families([done.metrics for done in await self._ask_all(ReadMetrics)])
            elif call.method in ("sleep", "wake_up"):
                async with self._sleep_lock:
                    reply.value = await self._change_sleep(call)
            else:
                reply.value = await self._client.utility(call.method, call.adapter, call.options)
                if call.adapter is not None:
                    adapter, is_loaded = call.adapter, call.method == "load_adapter"
                    await self._ask_all(lambda call_id: SetAdapter(call_id, adapter, is_loaded))
        except EngineDeadError as error:
            reply.dead = str(error)
        except ValueError as error:
            reply.error = str(error)
        await self._send(call.process, reply)

    async def _change_sleep(self, call: Call) -> dict[str, Any]:
        """No process may have a request on its way when the engine is told to sleep: it would be refused after its acceptance."""
        is_sleeping = True
        try:
            if call.method == "sleep":
                await self._ask_all(lambda call_id: SetSleeping(call_id, True))
            answer = await self._client.utility(call.method, None, call.options)
            is_sleeping = bool(answer["is_sleeping"])
        except ValueError:
            is_sleeping = bool((await self._client.utility("is_sleeping"))["is_sleeping"])
            raise
        finally:
            await self._ask_all(lambda call_id: SetSleeping(call_id, is_sleeping))
        return answer

    async def _ask_all(self, make: Any) -> list[Done]:
        """Send a message to every process, and wait for all answers."""
        futures = []
        for process in range(len(self._outputs)):
            self._num_calls += 1
            future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
            self._calls[self._num_calls] = future
            futures.append((self._num_calls, future))
            await self._send(process, make(self._num_calls))
        try:
            return [await future for _, future in futures]
        finally:
            for call_id, _ in futures:
                del self._calls[call_id]

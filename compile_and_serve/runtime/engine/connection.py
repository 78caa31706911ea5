"""`EngineConnection`: a client of an engine process. Any number of processes may have one to the same engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from compile_and_serve.runtime.child_process import LINGER_MS, describe_error
from compile_and_serve.runtime.engine.engine_socket import engine_address
from compile_and_serve.runtime.engine.heartbeat import HeartbeatMonitor, heartbeat_address
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import (
    AbortRequests,
    AddRequest,
    Connect,
    EngineDead,
    EngineInfo,
    EngineReady,
    EngineRequest,
    EngineStage,
    EngineStats,
    FromEngine,
    Heartbeat,
    Shutdown,
    StageCallback,
    StepOutputs,
    ToEngine,
    UtilityCall,
    UtilityOptions,
    UtilityResult,
    ignore_stage,
)

logger = logging.getLogger(__name__)

OUTPUTS_PER_TURN = 256  # a few milliseconds of work for the reader
_RECONNECT_MS = 10  # the engine's process binds its socket some time after its start


class EngineDeadError(RuntimeError):
    """The engine is gone. The message is one sentence."""


class EngineStartError(ValueError):
    """The engine could not start. The message is one sentence."""


class EngineFullError(RuntimeError):
    """The engine has no room for a request. The message is one sentence. is_of_key: its API key has too many."""

    def __init__(self, message: str, *, is_of_key: bool = False) -> None:
        super().__init__(message)
        self.is_of_key = is_of_key


class EngineConnection:
    """A client of an engine process that another process has started, used from one event loop.

    First `await start()`. Then send requests with `add_request` and read every step's outputs from `outputs()`, until
    `shutdown`. Once the engine is dead, every method and every pending wait raises `EngineDeadError` with the reason.

    name: unlike those of the engine's other clients. folder: where the engine's sockets lie. is_sole: no other client sends requests.
    stats: of the last step. num_others: unfinished sequences of other clients, as of that step.
    """

    def __init__(self, name: str, folder: str, *, is_sole: bool = False, on_stage: StageCallback = ignore_stage) -> None:
        self.name, self.folder = name, folder
        self.stats = EngineStats()
        self.num_others = 0
        self.dead_reason: str | None = None
        self._is_sole = is_sole
        self._on_stage = on_stage
        self._info: EngineInfo | None = None
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._steps: asyncio.Queue[StepOutputs | None] = asyncio.Queue()  # None: the end
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_calls = 0
        self._stopping = False
        self._death_reason: str | None = None
        self._heartbeats = HeartbeatMonitor()
        self._ready: asyncio.Future[EngineInfo]

    @property
    def info(self) -> EngineInfo:
        """Limits and properties of the engine, known once `start` has returned."""
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def folders(self) -> list[str]:
        """What other processes need to `connect`."""
        return [self.folder]

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and takes requests."""
        return self._info is not None and self.dead_reason is None and not self._stopping

    def health_problem(self) -> str | None:
        """One sentence if the engine is dead, silent or stuck in a step, else None. Does not wait for the engine."""
        if not self.is_alive:
            return self.dead_reason or "The engine is shutting down."
        return self._heartbeats.problem()

    async def start(self) -> EngineInfo:
        """Connect, and wait until the engine is ready. Raises `EngineStartError` with the engine's own sentence if it cannot start."""
        try:
            self._connect()
            self._info = await self._ready
        except BaseException:
            await self._close()
            raise
        return self._info

    async def add_request(self, request: EngineRequest, *, confirm: bool = True) -> None:
        """Send a request. If it cannot run, an output with finish_reason "error" comes back.

        confirm: if other clients send requests too and the engine limits their number, wait for its word, and raise `EngineFullError` if
        there is no room.
        """
        is_limited = self.info.max_in_flight is not None or (request.tenant is not None and request.tenant.max_waiting is not None)
        if not confirm or self._is_sole or not is_limited:
            await self._send(AddRequest(request=request))
            return
        answer = await self._call(lambda call_id: AddRequest(request=request, call_id=call_id))
        if answer.error is not None:
            raise EngineFullError(answer.error, is_of_key=bool(answer.value.get("limited")))

    async def abort(self, request_ids: list[str]) -> None:
        """End requests. Their outputs that are already on the way still arrive."""
        await self._send(AbortRequests(request_ids=request_ids))

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """Every step's outputs, in order, for a single reader.

        Ends after `shutdown`. Raises `EngineDeadError` if the engine dies.
        """
        while (step := await self._steps.get()) is not None:
            yield step
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    async def utility(
        self, method: str, adapter: LoRARequest | None = None, options: UtilityOptions | None = None
    ) -> dict[str, int | float | str | bool | None]:
        """Call a method of `EngineCore.utility` and wait for the answer. Raises `ValueError` with the engine's sentence."""
        result = await self._call(lambda call_id: UtilityCall(call_id=call_id, method=method, adapter=adapter, options=options or {}))
        if result.error is not None:
            raise ValueError(result.error)
        return result.value

    async def flush(self) -> None:
        """Return once the engine has received everything that was sent so far."""
        await self.utility("ping")

    @property
    def dead_replicas(self) -> list[int]:
        """The engine is its only replica."""
        return [] if self.dead_reason is None else [0]

    def die(self, reason: str, dead_replicas: Sequence[int] = (0,)) -> None:
        """The engine is dead. It has said so itself, or the process that started it has."""
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(reason))
        self._steps.put_nowait(None)
        self._fail_calls(reason)

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Close the connection; the engine lives on. What was sent has 2 seconds to arrive. May be called more than once."""
        self._stopping = True
        await self._close(linger=LINGER_MS)

    def _connect(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.set_hwm(0)
        heartbeats = self._context.socket(zmq.SUB)
        heartbeats.subscribe(b"")
        for socket, address in ((self._socket, engine_address(self.folder)), (heartbeats, heartbeat_address(self.folder))):
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.connect(address)
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name="engine-outputs")
        self._tasks = [self._reader, asyncio.create_task(self._read_heartbeats(heartbeats), name="engine-heartbeats")]

    async def _call(self, make: Callable[[int], ToEngine]) -> UtilityResult:
        """Send a message with a new call id, and wait for its answer."""
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(make(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def _send(self, message: ToEngine) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self._stopping and not isinstance(message, (Shutdown, AbortRequests)):
            raise EngineDeadError("The engine is shutting down.")
        assert self._context is not None, "the engine has not started"
        # The queue is unlimited. Not ZMQ's IMMEDIATE: with it, messages that an engine sent before its end may be lost.
        await self._socket.send(self._encoder.encode(message))

    async def _read(self) -> None:
        """Read the engine's messages until one cannot be read; then nobody would answer the requests."""
        try:
            await self._read_messages()
        except Exception as error:
            logger.error("Reading the engine's messages failed.", exc_info=error)
            self.die(f"The engine's messages could not be read: {describe_error(error)}")

    async def _read_messages(self) -> None:
        await self._socket.send(self._encoder.encode(Connect()))
        num_taken = 0
        while True:
            message = self._decoder.decode(await self._socket.recv())
            if isinstance(message, StepOutputs):
                if message.stats is not None:
                    self.stats, self.num_others = message.stats, message.num_others
                self._steps.put_nowait(message)
                num_taken += 1 + len(message.outputs)  # a step without outputs is work too
                if num_taken >= OUTPUTS_PER_TURN:
                    # `recv` and the reader of `_steps` yield only when they must wait. While this process lags behind the
                    # engine, they would never yield, and the event loop would run nothing else.
                    num_taken = 0
                    await asyncio.sleep(0)
            elif isinstance(message, UtilityResult):
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, EngineStage):
                self._on_stage(message.stage, message.seconds, message.detail)
            elif isinstance(message, EngineReady):
                self._heartbeats = HeartbeatMonitor()  # the first heartbeat follows
                if not self._ready.done():
                    self._ready.set_result(message.info)
            elif isinstance(message, EngineDead):
                self._death_reason = message.reason
                self.die(message.reason)

    async def _read_heartbeats(self, socket: zmq.asyncio.Socket) -> None:
        decoder = msgspec.msgpack.Decoder(Heartbeat)
        while True:
            self._heartbeats.receive(decoder.decode(await socket.recv()))

    def _fail_calls(self, reason: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    async def _close(self, linger: int = 0) -> None:
        """linger: milliseconds in which what was sent may still arrive."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if not self._stopping and self.dead_reason is None:
            self.dead_reason = "The engine is shut down."
        self._steps.put_nowait(None)
        self._fail_calls(self.dead_reason or "The engine is shut down.")
        if self._context is not None:
            self._context.destroy(linger=linger)

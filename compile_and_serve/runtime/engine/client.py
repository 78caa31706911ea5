"""`SyncEngine` runs an engine in this process, `AsyncEngineClient` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from compile_and_serve.runtime.child_process import LINGER_MS, boot_input, describe_error, describe_exit, one_device, private_folder
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.heartbeat import HeartbeatMonitor
from compile_and_serve.runtime.engine.process import BOOT_CODE, Bootstrap
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import (
    AbortRequests,
    AddRequest,
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

if TYPE_CHECKING:
    from compile_and_serve.runtime.engine.core import EngineCore

logger = logging.getLogger(__name__)

OUTPUTS_PER_TURN = 256  # a few milliseconds of work for the reader
_EXIT_GRACE_SECONDS = 10.0  # for the process to end after its last message; longer than the process grants its ranks


class EngineDeadError(RuntimeError):
    """The engine is gone. The message is one sentence."""


class EngineStartError(ValueError):
    """The engine could not start. The message is one sentence."""


class SyncEngine:
    """An engine in this process; the caller drives it with `step`. Construction raises the errors of `EngineCore`."""

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        from compile_and_serve.runtime.engine.core import EngineCore

        replicas = config.parallel.data_parallel_size
        if replicas > 1:
            raise ValueError(f"data_parallel_size is {replicas}, but only the server can run replicas: use `serve`, or set it to 1.")
        self._core: EngineCore | None = EngineCore(config, on_stage=on_stage)
        self.info: EngineInfo = self._core.info

    @property
    def core(self) -> EngineCore:
        """The engine core. Raises `EngineDeadError` after `shutdown`."""
        if self._core is None:
            raise EngineDeadError("The engine is shut down.")
        return self._core

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` for one that can never run."""
        self.core.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        self.core.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.core.has_work()

    def step(self) -> StepOutputs:
        """Run one step and return its outputs, which are empty if there is no work."""
        return self.core.step()

    def shutdown(self) -> None:
        """Free the model and its KV cache. May be called more than once."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None
            gc.collect()  # the runner and its graphs refer to each other, so only the collector frees the cache


class AsyncEngineClient:
    """An engine in a process of its own, used from one event loop.

    First `await start()`. Then send requests with `add_request` and read every step's outputs from `outputs()`, until
    `shutdown`. Once the engine is dead, every method and every pending wait raises `EngineDeadError` with the reason.
    """

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        self.config = config
        self.stats = EngineStats()
        self.dead_reason: str | None = None
        self._on_stage = on_stage
        self._info: EngineInfo | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
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

    @property
    def info(self) -> EngineInfo:
        """Limits and properties of the engine, known once `start` has returned."""
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and takes requests."""
        return self._info is not None and self.dead_reason is None and not self._stopping

    def health_problem(self) -> str | None:
        """One sentence if the engine is dead, silent or stuck in a step, else None. Does not wait for the engine."""
        if not self.is_alive:
            return self.dead_reason or "The engine is shutting down."
        return self._heartbeats.problem()

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The engine's exit status (negative: the signal that ended it); None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> EngineInfo:
        """Start the process and wait until the engine is ready. `on_stage` is called as each stage ends.

        Raises `EngineStartError` with the engine's own sentence if it cannot start.
        """
        assert self._process is None, "the engine was started before"
        self._folder = private_folder()
        addresses = [f"ipc://{Path(self._folder) / name}" for name in ("in", "out")]
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._output = self._context.socket(zmq.PULL)
        for socket, address in zip((self._input, self._output), addresses, strict=True):
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.set_hwm(0)
            socket.bind(address)
        config, environment = self._child_options()
        # A new session: signals to this process's group do not reach the engine, which stops when we tell it to.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BOOT_CODE, stdin=asyncio.subprocess.PIPE, start_new_session=True, env=environment
        )
        bootstrap = Bootstrap(
            config=config,
            input_address=addresses[0],
            output_address=addresses[1],
            folder=self._folder,
            log_level=logging.getLogger("compile_and_serve").getEffectiveLevel(),
            log_format=current_format(),
        )
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(boot_input(bootstrap))
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch(ready), name="engine-watch")
        self._reader = asyncio.create_task(self._read(ready), name="engine-outputs")
        self._tasks = [self._reader, self._watcher]
        try:
            self._info = await ready
        except BaseException:
            await self._close()
            raise
        return self._info

    async def add_request(self, request: EngineRequest) -> None:
        """Send a request. If it cannot run, an output with finish_reason "error" comes back."""
        await self._send(AddRequest(request=request))

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
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self._send(UtilityCall(call_id=call_id, method=method, adapter=adapter, options=options or {}))
            result = await future
        finally:
            self._calls.pop(call_id, None)
        if result.error is not None:
            raise ValueError(result.error)
        return result.value

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop the engine. drain: finish the running requests first; otherwise abort them.

        timeout: seconds after which the process is killed; None waits without a limit if `drain`, else 10 seconds.
        `outputs` ends once the last output was read. May be called more than once.
        """
        if self._process is None or not self._tasks:
            return
        if self.dead_reason is None:
            self._stopping = True
            with contextlib.suppress(EngineDeadError):
                await self._send(Shutdown(drain=drain))
            if timeout is None and not drain:
                timeout = _EXIT_GRACE_SECONDS
            try:
                await asyncio.wait_for(self._process.wait(), timeout)
                await self._watcher  # it ends once the last output was read
            except TimeoutError:
                logger.warning("The engine did not stop within %g seconds and is killed.", timeout)
        await self._close()

    async def _send(self, message: ToEngine) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self._stopping and not isinstance(message, (Shutdown, AbortRequests)):
            raise EngineDeadError("The engine is shutting down.")
        assert self._context is not None, "the engine has not started"
        try:
            await self._input.send(self._encoder.encode(message), zmq.NOBLOCK)  # the queue is unlimited
        except zmq.Again as error:  # no peer: the process is gone, and `_watch` will report it
            raise EngineDeadError("The engine process has ended.") from error

    def _child_options(self) -> tuple[EngineConfig, dict[str, str]]:
        """The child's config and environment. A replica with a single rank sees only its own CUDA device."""
        config, environment = self.config, dict(os.environ)
        parallel = config.parallel
        if parallel.data_parallel_size > 1 and parallel.executor is None and config.num_ranks == 1:
            named, index = one_device(parallel.data_parallel_rank)
            config, environment = replace(config, parallel=replace(parallel, device_index=index)), environment | named
        return config, environment

    async def _read(self, ready: asyncio.Future[EngineInfo]) -> None:
        """Read the engine's messages until one cannot be read; then nobody would answer the requests, so the engine ends."""
        try:
            await self._read_messages(ready)
        except Exception as error:
            logger.error("Reading the engine's messages failed.", exc_info=error)
            self._die(f"The engine's messages could not be read: {describe_error(error)}", ready)
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()

    async def _read_messages(self, ready: asyncio.Future[EngineInfo]) -> None:
        num_taken = 0
        while True:
            message = self._decoder.decode(await self._output.recv())
            if isinstance(message, StepOutputs):
                if message.stats is not None:
                    self.stats = message.stats
                self._steps.put_nowait(message)
                num_taken += 1 + len(message.outputs)  # a step without outputs is work too
                if num_taken >= OUTPUTS_PER_TURN:
                    # `recv` and the reader of `_steps` yield only when they must wait. While this process lags behind the
                    # engine, they would never yield, and the event loop would run nothing else.
                    num_taken = 0
                    await asyncio.sleep(0)
            elif isinstance(message, Heartbeat):
                self._heartbeats.receive(message)
            elif isinstance(message, UtilityResult):
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, EngineStage):
                self._on_stage(message.stage, message.seconds, message.detail)
            elif isinstance(message, EngineReady):
                self._heartbeats = HeartbeatMonitor()  # the first heartbeat follows
                if not ready.done():
                    ready.set_result(message.info)
            elif isinstance(message, EngineDead):
                self._death_reason = message.reason
                self._die(message.reason, ready)

    async def _watch(self, ready: asyncio.Future[EngineInfo]) -> None:
        """Wait for the process to end, and read its last messages before reporting that."""
        assert self._process is not None
        status = await self._process.wait()
        while not self._reader.done() and await self._output.poll(100):
            await asyncio.sleep(0)
        if self._stopping and status == 0:
            self._steps.put_nowait(None)
            self._fail_calls("The engine is shut down.")
        elif self._death_reason is None:
            self._die(f"The engine process {describe_exit(status)}.", ready)

    def _die(self, reason: str, ready: asyncio.Future[EngineInfo]) -> None:
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if not ready.done():
            ready.set_exception(EngineStartError(reason))
        self._steps.put_nowait(None)
        self._fail_calls(reason)

    def _fail_calls(self, reason: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    async def _close(self) -> None:
        process, context = self._process, self._context
        assert process is not None
        assert context is not None
        if process.returncode is None and self.dead_reason is not None:  # it has sent its last message
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _EXIT_GRACE_SECONDS)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if not self._stopping and self.dead_reason is None:
            self.dead_reason = "The engine is shut down."
        self._steps.put_nowait(None)
        self._fail_calls(self.dead_reason or "The engine is shut down.")
        context.destroy(linger=0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

"""Runs several API processes on one port, each with a connection of its own to the engine (`--api-server-count`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from compile_and_serve.runtime.child_process import boot_input, describe_exit, private_folder
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.replicas import DataParallelClient, OwnEngine
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.serve.http.listener import ServerStartError, open_socket
from compile_and_serve.serve.observe.throughput import ThroughputLog, TokenCounts
from compile_and_serve.serve.processes.api_bootstrap import BOOT_CODE, ApiBootstrap
from compile_and_serve.serve.processes.reports import wait_for_report
from compile_and_serve.serve.processes.siblings import Siblings
from compile_and_serve.serve.settings import ServerSettings

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_STOP_SECONDS = 15.0  # beyond the time that requests get to finish
_TELL_SECONDS = 5.0
_BACKLOG = 2048
_MAX_DEATHS, _DEATH_SECONDS = 5, 300.0  # of API processes; if more die within the time, the server ends


async def serve_with_processes(
    client: OwnEngine,
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    adapters: list[LoRARequest],
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    on_ready: Callable[[], None],
) -> bool:
    """Serve until `stop` is set or the engine dies; whether it lives. client: started. listener: bound.

    A process that dies is started again, unless too many die; the others serve meanwhile.

    Every process binds the address itself, so that the kernel spreads connections evenly. A Unix socket is shared instead.
    Raises `ServerStartError` if a process cannot start.
    """
    folder = private_folder()
    siblings = Siblings(Path(folder), settings.api_server_count)
    stats: dict[int, EngineStats] = {}
    engine_watch = asyncio.create_task(_watch_engine(client, stats, siblings))
    processes: list[_Process] = []
    helpers: list[asyncio.Task[None]] = [engine_watch]
    reserved: socket.socket | None = None
    try:
        if settings.uds is None:
            port = listener.getsockname()[1]
            listener.close()
            # Bound but not listening, it keeps the port for this user without taking connections.
            reserved = open_socket(settings.host, port, shared=True)
            settings = replace(settings, port=port)
        else:
            listener.listen(_BACKLOG)
        fd = None if settings.uds is None else listener.fileno()
        processes = [
            _Process(_bootstrap(number, client, config, settings, fd, adapters, folder)) for number in range(settings.api_server_count)
        ]
        for process in processes:
            await process.launch()
        starting = asyncio.create_task(_all_ready(processes))
        helpers.append(starting)
        await asyncio.wait([starting, engine_watch], return_when=asyncio.FIRST_COMPLETED)
        if engine_watch.done():
            raise ServerStartError(f"The engine died while the API processes started: {client.dead_reason}")
        await starting
        if settings.throughput_log:
            helpers.append(asyncio.create_task(_log_throughput(settings.throughput_log, stats, siblings)))
        on_ready()
        stopping = asyncio.create_task(stop.wait())
        helpers.append(asyncio.create_task(_pass_on(stop, hurry, siblings)))
        deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        is_well = True
        while is_well:
            await asyncio.wait([stopping, engine_watch, *(process.ended for process in processes)], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() or engine_watch.done():
                is_well = not engine_watch.done()
                break
            is_well = await _start_again(processes, deaths)
        stopping.cancel()
        if client.num_others and is_well:
            logger.info("Shutting down: %d sequences have %g seconds to finish.", client.num_others, settings.shutdown_timeout)
        stop.set()
        for process in processes:
            process.kill_unless_ready()
        await asyncio.wait([process.ended for process in processes], timeout=settings.shutdown_timeout + _STOP_SECONDS)
        for process in processes:
            if not process.ended.done():
                logger.warning("API process %d did not end in time and is killed.", process.bootstrap.process)
        return is_well
    finally:
        for helper in helpers:
            helper.cancel()
        for process in processes:
            await process.end()
        if reserved is not None:
            reserved.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Process:
    """One API process, which may die and be launched again. ended: its exit status."""

    def __init__(self, bootstrap: ApiBootstrap) -> None:
        self.bootstrap = bootstrap
        self.ended: asyncio.Task[int]
        self._child: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Task[None]

    async def launch(self) -> None:
        fd = self.bootstrap.listener_fd
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            BOOT_CODE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if fd is None else (fd,),
        )
        assert self._child.stdin is not None
        self._child.stdin.write(boot_input(self.bootstrap))
        self.ended = asyncio.create_task(self._child.wait())
        self._ready = asyncio.create_task(self._wait_ready())

    async def launch_again(self) -> None:
        """After its death. The processes that live know the adapters."""
        with contextlib.suppress(ServerStartError):
            await self._ready
        self.bootstrap = replace(self.bootstrap, num_restarts=self.bootstrap.num_restarts + 1, adapters=[])
        await self.launch()
        self._ready.add_done_callback(self._report_restart)

    async def ready(self) -> None:
        """Return once it serves; see `wait_for_report`. Raises `ServerStartError` with its sentence."""
        await self._ready

    def kill_unless_ready(self) -> None:
        """Nobody could tell it to stop."""
        if not self._ready.done():
            self._kill()

    async def end(self) -> None:
        """Kill it unless it has ended."""
        if self._child is not None:
            self._kill()
            await self._child.wait()
            self._ready.cancel()

    def _kill(self) -> None:
        assert self._child is not None
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def _wait_ready(self) -> None:
        assert self._child is not None
        await wait_for_report(self._child, f"The API processes did not start: process {self.bootstrap.process}")

    def _report_restart(self, ready: asyncio.Task[None]) -> None:
        if not ready.cancelled() and ready.exception() is None:
            logger.info("API process %d serves again.", self.bootstrap.process)


async def _start_again(processes: list[_Process], deaths: deque[float]) -> bool:
    """Launch those that have died again. → false if all or too many have. deaths: when the last ones did."""
    dead = [process for process in processes if process.ended.done()]
    for process in dead:
        now = time.monotonic()
        is_over = len(dead) == len(processes) or (len(deaths) == _MAX_DEATHS and now - deaths[0] < _DEATH_SECONDS)
        deaths.append(now)
        what = "so the server ends" if is_over else "and is started again"
        logger.error("API process %d %s, %s.", process.bootstrap.process, describe_exit(process.ended.result()), what)
        if is_over:
            return False
        await process.launch_again()
    return True


def _bootstrap(
    number: int,
    client: OwnEngine,
    config: EngineConfig,
    settings: ServerSettings,
    listener_fd: int | None,
    adapters: list[LoRARequest],
    folder: str,
) -> ApiBootstrap:
    return ApiBootstrap(
        process=number,
        num_restarts=0,
        config=config,
        settings=replace(settings, throughput_log=0.0, log_level="warning"),
        adapters=adapters,
        engine_folders=client.folders,
        listener_fd=listener_fd,
        folder=folder,
        log_level=logging.getLogger("compile_and_serve").getEffectiveLevel(),
        log_format=current_format(),
    )


async def _all_ready(processes: list[_Process]) -> None:
    """Return once every process serves. Raises `ServerStartError` with the sentence of the first that cannot."""
    try:
        async with asyncio.timeout(_START_SECONDS):
            await asyncio.gather(*(process.ready() for process in processes))
    except TimeoutError:
        raise ServerStartError("The API processes did not start: they did not answer in time.") from None


async def _watch_engine(client: OwnEngine, stats: dict[int, EngineStats], siblings: Siblings) -> None:
    """Keep each replica's last stats until the engine is dead, and tell the processes why. They cannot see how its process ended."""

    async def tell(index: int, reason: str | None) -> None:
        if reason is None:
            await siblings.tell("replica_back", index, timeout=_TELL_SECONDS)
        else:
            await siblings.tell("replica_died", index, reason, timeout=_TELL_SECONDS)

    if isinstance(client, DataParallelClient):
        client.on_change = tell
    with contextlib.suppress(EngineDeadError):
        async for step in client.outputs():
            if step.stats is not None:
                stats[step.replica] = step.stats
            if client.dead_reason is not None:
                break  # another replica may live on, but the server ends, once its requests have
    logger.error("The engine is dead: %s", client.dead_reason)
    await siblings.tell("engine_died", client.dead_reason, client.dead_replicas, timeout=_TELL_SECONDS)


async def _log_throughput(seconds: float, stats: dict[int, EngineStats], siblings: Siblings) -> None:
    tokens = TokenCounts()
    log = ThroughputLog(tokens, stats)
    while True:
        await asyncio.sleep(seconds)
        if loads := await siblings.call("load"):
            tokens.prompt, tokens.generation, num_held = (sum(counts) for counts in zip(*loads, strict=True))
            stats.setdefault(0, EngineStats()).num_held = num_held
            log.write()


async def _pass_on(stop: asyncio.Event, hurry: asyncio.Event, siblings: Siblings) -> None:
    """Let the processes finish their requests when `stop` is set, and cancel them when `hurry` is."""
    await stop.wait()
    await siblings.tell("stop_serving", hurry.is_set(), timeout=_TELL_SECONDS)
    await hurry.wait()
    await siblings.tell("stop_serving", True, timeout=_TELL_SECONDS)

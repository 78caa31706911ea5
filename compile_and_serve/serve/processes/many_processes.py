"""Runs several API processes on one port, each with a connection of its own to the engine (`--api-server-count`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from compile_and_serve.runtime.child_process import boot_input, describe_exit, private_folder
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.replicas import OwnEngine
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.serve.http.listener import ServerStartError, open_socket
from compile_and_serve.serve.observe.throughput import ThroughputLog, TokenCounts
from compile_and_serve.serve.processes.api_bootstrap import BOOT_CODE, ApiBootstrap
from compile_and_serve.serve.processes.siblings import Siblings
from compile_and_serve.serve.settings import ServerSettings

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_STOP_SECONDS = 15.0  # beyond the time that requests get to finish
_TELL_SECONDS = 5.0
_BACKLOG = 2048


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
    """Serve until `stop` is set or something dies; whether nothing died. client: started. listener: bound.

    Every process binds the address itself, so that the kernel spreads connections evenly. A Unix socket is shared instead.
    Raises `ServerStartError` if a process cannot start.
    """
    folder = private_folder()
    siblings = Siblings(Path(folder), settings.api_server_count)
    stats: dict[int, EngineStats] = {}
    engine_watch = asyncio.create_task(_watch_engine(client, stats, siblings))
    processes: list[asyncio.subprocess.Process] = []
    waits: list[asyncio.Task[int]] = []
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
        for process in range(settings.api_server_count):
            processes.append(await _launch(process, client.folders, config, settings, listener, adapters, folder))
            waits.append(asyncio.create_task(processes[-1].wait()))
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
        await asyncio.wait([stopping, engine_watch, *waits], return_when=asyncio.FIRST_COMPLETED)
        is_well = stop.is_set() and not engine_watch.done()
        stopping.cancel()
        for number, wait in enumerate(waits):
            if wait.done() and not stop.is_set():
                logger.error("API process %d %s, so the server ends.", number, describe_exit(wait.result()))
        if client.num_others and is_well:
            logger.info("Shutting down: %d sequences have %g seconds to finish.", client.num_others, settings.shutdown_timeout)
        stop.set()
        await asyncio.wait(waits, timeout=settings.shutdown_timeout + _STOP_SECONDS)
        for number, wait in enumerate(waits):
            if not wait.done():
                logger.warning("API process %d did not end in time and is killed.", number)
        return is_well
    finally:
        for helper in helpers:
            helper.cancel()
        for child in processes:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            await child.wait()
        if reserved is not None:
            reserved.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _launch(
    process: int,
    engine_folders: list[str],
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    adapters: list[LoRARequest],
    folder: str,
) -> asyncio.subprocess.Process:
    fd = None if settings.uds is None else listener.fileno()
    bootstrap = ApiBootstrap(
        process=process,
        config=config,
        settings=replace(settings, throughput_log=0.0, log_level="warning"),
        adapters=adapters,
        engine_folders=engine_folders,
        listener_fd=fd,
        folder=folder,
        log_level=logging.getLogger("compile_and_serve").getEffectiveLevel(),
        log_format=current_format(),
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        BOOT_CODE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        pass_fds=() if fd is None else (fd,),
    )
    assert child.stdin is not None
    child.stdin.write(boot_input(bootstrap))
    return child


async def _all_ready(processes: list[asyncio.subprocess.Process]) -> None:
    """Return once every process serves; see `api_process.report`. Raises `ServerStartError` with the sentence of the first that cannot."""

    async def ready(number: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        if not (line := await process.stdout.readline()):
            how = describe_exit(await process.wait())
            raise ServerStartError(f"The API processes did not start: process {number} {how}.")
        if (problem := msgspec.json.decode(line, type=str | None)) is not None:
            raise ServerStartError(problem)

    try:
        async with asyncio.timeout(_START_SECONDS):
            await asyncio.gather(*(ready(number, process) for number, process in enumerate(processes)))
    except TimeoutError:
        raise ServerStartError("The API processes did not start: they did not answer in time.") from None


async def _watch_engine(client: OwnEngine, stats: dict[int, EngineStats], siblings: Siblings) -> None:
    """Keep each replica's last stats until the engine is dead, and tell the processes why. They cannot see how its process ended."""
    with contextlib.suppress(EngineDeadError):
        async for step in client.outputs():
            if step.stats is not None:
                stats[step.replica] = step.stats
            if client.dead_reason is not None:
                break  # another replica may live on, but the server ends
    logger.error("The engine is dead: %s", client.dead_reason)
    await siblings.tell("engine_died", client.dead_reason, timeout=_TELL_SECONDS)


async def _log_throughput(seconds: float, stats: dict[int, EngineStats], siblings: Siblings) -> None:
    tokens = TokenCounts()
    log = ThroughputLog(tokens, stats)
    while True:
        await asyncio.sleep(seconds)
        with contextlib.suppress(OSError):  # a process has died, so the server ends
            tokens.prompt, tokens.generation, num_held = (sum(counts) for counts in zip(*await siblings.call("load"), strict=True))
            stats.setdefault(0, EngineStats()).num_held = num_held
            log.write()


async def _pass_on(stop: asyncio.Event, hurry: asyncio.Event, siblings: Siblings) -> None:
    """Let the processes finish their requests when `stop` is set, and cancel them when `hurry` is."""
    await stop.wait()
    await siblings.tell("stop_serving", hurry.is_set(), timeout=_TELL_SECONDS)
    await hurry.wait()
    await siblings.tell("stop_serving", True, timeout=_TELL_SECONDS)

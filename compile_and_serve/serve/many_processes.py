"""Runs several API processes on one port around one coordinator and one engine (`--api-server-count`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from compile_and_serve.runtime.child_process import boot_input, describe_exit, private_folder
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.serve.api_bootstrap import BOOT_CODE, ApiBootstrap
from compile_and_serve.serve.coordinator import Coordinator
from compile_and_serve.serve.coordinator_messages import StopServing
from compile_and_serve.serve.engine import EngineClient
from compile_and_serve.serve.listener import ServerStartError, open_socket
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.throughput import ThroughputLog

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_STOP_SECONDS = 15.0  # beyond the time that requests get to finish
_BACKLOG = 2048


async def serve_with_processes(
    client: EngineClient,
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
    coordinator = Coordinator(client, settings.api_server_count, folder)
    processes: list[asyncio.subprocess.Process] = []
    waits: list[asyncio.Task[int]] = []
    helpers: list[asyncio.Task[None]] = []
    reserved: socket.socket | None = None
    try:
        coordinator.start()
        if settings.uds is None:
            port = listener.getsockname()[1]
            listener.close()
            # Bound but not listening, it keeps the port for this user without taking connections.
            reserved = open_socket(settings.host, port, shared=True)
            settings = replace(settings, port=port)
        else:
            listener.listen(_BACKLOG)
        for process in range(settings.api_server_count):
            processes.append(await _launch(process, coordinator, client.info, config, settings, listener, adapters, folder))
            waits.append(asyncio.create_task(processes[-1].wait()))
        await _all_ready(coordinator, waits)
        if settings.throughput_log:
            log = ThroughputLog(coordinator.tokens, coordinator.stats)
            helpers.append(asyncio.create_task(log.run(settings.throughput_log)))
        on_ready()
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(coordinator.gone.wait())]
        await asyncio.wait([*ends, *waits], return_when=asyncio.FIRST_COMPLETED)
        is_well = stop.is_set() and not coordinator.gone.is_set()
        for number, wait in enumerate(waits):
            if wait.done() and not stop.is_set():
                logger.error("API process %d %s, so the server ends.", number, describe_exit(wait.result()))
        for end in ends:
            end.cancel()
        if coordinator.num_in_flight and is_well:
            logger.info("Shutting down: %d sequences have %g seconds to finish.", coordinator.num_in_flight, settings.shutdown_timeout)
        await coordinator.tell(StopServing(hurry=hurry.is_set()))
        hurrying = asyncio.create_task(_pass_on(hurry, coordinator))
        helpers.append(hurrying)
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
        coordinator.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _launch(
    process: int,
    coordinator: Coordinator,
    info: EngineInfo,
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
        info=info,
        adapters=adapters,
        to_address=coordinator.to_address,
        from_address=coordinator.from_addresses[process],
        first_process=f"{folder}/first",
        listener_fd=fd,
        folder=folder,
        log_level=logging.getLogger("compile_and_serve").getEffectiveLevel(),
        log_format=current_format(),
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BOOT_CODE, stdin=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=() if fd is None else (fd,)
    )
    assert child.stdin is not None
    child.stdin.write(boot_input(bootstrap))
    return child


async def _all_ready(coordinator: Coordinator, waits: list[asyncio.Task[int]]) -> None:
    async def ready() -> None:
        for event in coordinator.ready:
            await event.wait()

    waiting = asyncio.create_task(ready())
    watched: list[asyncio.Future[Any]] = [waiting, coordinator.failed, *waits]
    await asyncio.wait(watched, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if all(event.is_set() for event in coordinator.ready):
        return
    await asyncio.wait([coordinator.failed], timeout=1.0)
    if coordinator.failed.done():
        raise ServerStartError(coordinator.failed.result())
    ended = [number for number, wait in enumerate(waits) if wait.done()]
    how = f"process {ended[0]} {describe_exit(waits[ended[0]].result())}" if ended else "they did not answer in time"
    raise ServerStartError(f"The API processes did not start: {how}.")


async def _pass_on(hurry: asyncio.Event, coordinator: Coordinator) -> None:
    await hurry.wait()
    await coordinator.tell(StopServing(hurry=True))

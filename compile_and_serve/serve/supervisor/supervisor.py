"""Runs a server for each replica, on ports of their own, for a load balancer in front of them (`--data-parallel-multi-port-external-lb`).

Replica r serves on `--port` + r, with its own devices. The supervisor asks each for /health. A replica that has ended, or that has failed
so many times in a row, is started again, alone: the others serve meanwhile. It listens itself on `--data-parallel-supervisor-port`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import httpx
from fastapi import FastAPI, Response

from compile_and_serve.runtime.child_process import boot_input, describe_exit, one_device
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.messages import StageCallback, ignore_stage
from compile_and_serve.serve.errors import error_response
from compile_and_serve.serve.http.listener import ServerStartError, claimed_address, open_socket
from compile_and_serve.serve.http.middleware import ApiKeyMiddleware
from compile_and_serve.serve.http.responses import json_response
from compile_and_serve.serve.processes.reports import wait_for_report
from compile_and_serve.serve.server import EXIT_FAILURE, EXIT_OK, _begin, _loop_factory, _Signals, _uvicorn_config, _wait_any
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.supervisor.replica_server import BOOT_CODE, ReplicaBootstrap

logger = logging.getLogger(__name__)

_STOP_SECONDS = 15.0  # beyond the time that requests get to finish
_MAX_DELAY_SECONDS = 60.0  # before a replica that keeps failing is started again
_RESTART = "/restart"
_STEADY_SECONDS = 60.0  # a replica that served for so long has started well

State = Literal["starting", "serving", "draining", "waiting", "stopping"]


def supervise(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    on_stage: StageCallback = ignore_stage,
    on_ready: Callable[[list[str]], None] = lambda urls: None,
) -> int:
    """Run the replicas' servers until SIGINT or SIGTERM. → the exit code: 0, or 1 if a replica had to be killed at the end.

    on_stage: called once a replica serves. on_ready: called with the replicas' URLs once all serve. Raises a `ValueError` with one sentence
    if one of them cannot start.
    """
    size = config.parallel.data_parallel_size
    if settings.uds is not None or not 0 < settings.port <= 65536 - size:
        raise ServerStartError(f"{size} servers need {size} ports in a row: give --port, and no --uds.")
    if settings.tls is not None and settings.tls.require_client_certificate:
        raise ServerStartError("The supervisor has no certificate to ask the replicas with: leave out --ssl-require-client-cert.")
    with claimed_address(settings.host, settings.supervisor_port, None):
        listener = open_socket(settings.host, settings.supervisor_port)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_supervise(config, settings, listener, on_stage, on_ready))
        finally:
            listener.close()


async def _supervise(
    config: EngineConfig, settings: ServerSettings, listener: socket.socket, on_stage: StageCallback, on_ready: Callable[[list[str]], None]
) -> int:
    replicas = [Replica(index, config, settings) for index in range(config.parallel.data_parallel_size)]
    started = time.perf_counter()

    async def start(replica: Replica) -> None:
        await replica.start()
        on_stage(f"replica {replica.index}", time.perf_counter() - started, replica.url)

    with _Signals() as signals:
        try:
            starting = asyncio.gather(*(start(replica) for replica in replicas))
            await _wait_any(asyncio.ensure_future(_result(starting)), signals.stop)
            if not starting.done():
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return EXIT_OK
            await starting  # raises the start's error
            app = supervisor_app(replicas, settings)
            server, serving = await _begin(_uvicorn_config(app, settings), listener)
            keepers = [asyncio.create_task(replica.keep()) for replica in replicas]
            on_ready([replica.url for replica in replicas])
            await _wait_any(serving, signals.stop)
            ends = asyncio.gather(*(replica.stop() for replica in replicas))
            await _wait_any(asyncio.ensure_future(_result(ends)), signals.hurry)
            if not ends.done():
                for replica in replicas:
                    replica.terminate()
            are_well = all(await ends)
            server.should_exit = True
            await _wait_any(serving, timeout=1.0)
            for keeper in keepers:
                keeper.cancel()
            return EXIT_OK if are_well else EXIT_FAILURE
        finally:
            for replica in replicas:
                await replica.kill()


async def _result(awaited: asyncio.Future[Any]) -> None:
    """Wait for what `awaited` waits for; its result and its error stay in it."""
    await asyncio.wait([awaited])


class Replica:
    """One replica's server. num_restarts: how often it was started again. problem: a sentence while it is not well."""

    def __init__(self, index: int, config: EngineConfig, settings: ServerSettings) -> None:
        self.index = index
        self.port = settings.port + index
        self.state: State = "starting"
        self.problem: str | None = "It has not started yet."
        self.num_restarts = 0
        self._size = config.parallel.data_parallel_size
        self._settings, self._device = settings, config.device
        self._bootstrap = _bootstrap(index, config, settings)
        self._devices = [index * config.mesh.size + rank for rank in range(config.mesh.size)]
        self._child: asyncio.subprocess.Process | None = None
        scheme = "http" if settings.tls is None else "https"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def name(self) -> str:
        """For messages."""
        return f"Replica {self.index} of {self._size} (port {self.port})"

    @property
    def pid(self) -> int | None:
        """Of its server's process; None: there is none."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    def status(self) -> dict[str, Any]:
        """What the supervisor's routes say of it."""
        told = {"replica": self.index, "url": self.url, "state": self.state, "pid": self.pid, "restarts": self.num_restarts}
        return told | ({} if self.problem is None else {"problem": self.problem})

    async def start(self) -> None:
        """Return once it serves. Raises `ServerStartError` with its sentence."""
        self.state = "starting"
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            BOOT_CODE,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=os.environ | self._visible_devices(),
        )
        assert self._child.stdin is not None
        self._child.stdin.write(boot_input(self._bootstrap))
        try:
            await wait_for_report(self._child, self.name)
        except ServerStartError:
            await self.kill()
            raise
        if self.state == "starting":
            self.state, self.problem = "serving", None

    async def keep(self) -> None:
        """Start it again whenever it has ended or is not well, until it is stopped."""
        delay = 0.0
        while True:
            served_since = time.monotonic()
            how = await self._until_unwell()
            if time.monotonic() - served_since > _STEADY_SECONDS:
                delay = 0.0
            while self.state != "stopping":
                self.state, self.problem = "waiting", how
                logger.error("%s %s It is started again%s.", self.name, how, f" in {delay:.0f} seconds" if delay else "")
                await asyncio.sleep(delay)
                delay = min(_MAX_DELAY_SECONDS, max(1.0, 2 * delay))
                self.num_restarts += 1
                try:
                    await self.start()
                except ServerStartError as error:
                    how = f"did not start: {error}"
                    continue
                logger.info("%s serves again.", self.name)
                break
            else:
                return

    async def restart(self) -> None:
        """Let its requests finish and start it again. The others serve meanwhile."""
        assert self._child is not None
        self.state, self.problem = "draining", "It finishes its requests, and is then started again."
        self.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), self._settings.shutdown_timeout + _STOP_SECONDS)
        await self.kill()

    async def stop(self) -> bool:
        """Let its requests finish, and end it. → whether it ended by itself"""
        self.state, self.problem = "stopping", "It is shutting down."
        if self._child is None:
            return True
        self.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), self._settings.shutdown_timeout + _STOP_SECONDS)
        except TimeoutError:
            logger.warning("%s did not end in time and is killed.", self.name)
            return False
        return True

    def terminate(self) -> None:
        """Send SIGTERM: its requests may finish. The second time they are cancelled."""
        self._signal(signal.SIGTERM)

    async def kill(self) -> None:
        """End it at once, unless it has ended."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            await self._child.wait()

    async def _until_unwell(self) -> str:
        """Return once the server has ended, or was ended because it did not answer. → a predicate with a full stop"""
        assert self._child is not None
        ended = asyncio.create_task(self._child.wait())
        probing = asyncio.create_task(self._probe())
        await asyncio.wait([ended, probing], return_when=asyncio.FIRST_COMPLETED)
        if probing.done():
            await self.kill()
            await ended
            return probing.result()
        probing.cancel()
        return f"{describe_exit(ended.result())}."

    async def _probe(self) -> str:
        """Ask for /health until that has failed too often in a row. → a predicate that says how it failed last"""
        settings, num_failures = self._settings, 0
        async with httpx.AsyncClient(timeout=settings.probe_timeout, verify=False, trust_env=False) as http:
            while True:
                await asyncio.sleep(settings.probe_interval)
                try:
                    answer = await http.get(f"{self.url}/health", headers={"Host": "localhost"})
                    how = None if answer.status_code == 200 else f"answers /health with {answer.status_code}: {answer.text:.300}"
                except httpx.HTTPError as error:
                    how = f"does not answer /health ({type(error).__name__})"
                if self.state != "serving":
                    continue
                self.problem = None if how is None else f"It {how}."
                num_failures = 0 if how is None else num_failures + 1
                if how is not None and num_failures >= settings.probe_failures:
                    return f"{how}, {num_failures} times in a row."

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _visible_devices(self) -> dict[str, str]:
        names = [one_device(device, self._device)[0].get("CUDA_VISIBLE_DEVICES") for device in self._devices]
        return {"CUDA_VISIBLE_DEVICES": ",".join(filter(None, names))} if all(names) else {}


def _bootstrap(index: int, config: EngineConfig, settings: ServerSettings) -> ReplicaBootstrap:
    parallel = replace(config.parallel, data_parallel_size=1, num_servers=config.parallel.data_parallel_size)
    config = replace(config, parallel=parallel)
    settings = replace(settings, port=settings.port + index)
    if index:  # all replicas would dump the same files
        config, settings = replace(config, compile=replace(config.compile, dump_dir=None)), replace(settings, graphs_dir=None)
    level = logging.getLogger("compile_and_serve").getEffectiveLevel()
    return ReplicaBootstrap(replica=index, config=config, settings=settings, log_level=level, log_format=current_format())


def supervisor_app(replicas: list[Replica], settings: ServerSettings) -> FastAPI:
    """The supervisor's routes."""
    app = FastAPI(title="compile-and-serve supervisor", docs_url=None, redoc_url=None, openapi_url=None)

    def answer(unwell: list[Replica]) -> Response:
        body = json_response({"status": "ok" if not unwell else "unwell", "replicas": [replica.status() for replica in replicas]})
        body.status_code = 503 if unwell else 200
        return body

    @app.get("/health")
    async def health() -> Response:
        """200 while all replicas are well, else 503. The body says it of each."""
        return answer([replica for replica in replicas if replica.problem is not None])

    @app.get("/health/liveness")
    async def liveness() -> Response:
        """200 while the supervisor runs: it starts replicas again by itself."""
        return answer([])

    @app.get("/health/readiness")
    async def readiness() -> Response:
        """200 while all replicas take requests, else 503."""
        return answer([replica for replica in replicas if replica.state != "serving" or replica.problem is not None])

    @app.post(_RESTART)
    async def restart(replica: int) -> Response:
        """Let a replica's requests finish and start it again. The answer comes once they have."""
        if not settings.admin_routes:
            return error_response(404, "The supervisor restarts replicas only with --enable-admin-routes.")
        if not 0 <= replica < len(replicas):
            return error_response(404, f"There are {len(replicas)} replicas, and their numbers begin at 0.")
        one = replicas[replica]
        if one.state != "serving":
            return error_response(409, f"{one.name} does not serve: {one.problem}")
        await one.restart()
        return json_response(one.status())

    app.add_middleware(
        ApiKeyMiddleware,
        api_keys=settings.api_keys,
        admin_keys=settings.admin_keys,
        admin_paths=(_RESTART,),
        public=("/health/liveness", "/health/readiness"),
    )
    return app

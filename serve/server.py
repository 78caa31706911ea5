"""Runs the API server from the start of the engine to the exit code: socket, signals, graceful shutdown, engine death."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from runtime.config import EngineConfig
from runtime.engine_client import AsyncEngineClient, EngineStartError
from runtime.messages import EngineInfo
from runtime.tokenizer import Tokenizer, load_generation_defaults, load_tokenizer
from serve.app import create_app
from serve.context import ServerContext
from serve.settings import ServerSettings

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILURE = 0, 1
# After a cancellation, the time that answers get to leave.
_FLUSH_SECONDS = 5.0

StageCallback = Callable[[str, float, str], None]


class ServerStartError(ValueError):
    """The server cannot start; one sentence."""


def run(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    on_stage: StageCallback | None = None,
    on_ready: Callable[[str, EngineInfo], None] | None = None,
) -> int:
    """Start the engine, serve until SIGINT or SIGTERM, stop, and return the exit code (0: stopped on purpose, 1: the engine died).

    on_stage: (stage, seconds, detail) as start-up goes on. on_ready: (URL, engine info) once requests are taken.
    Raises the `ValueError` family with one sentence where nothing can be served: port in use, no tokenizer, the model does not load.
    """
    listener = open_socket(settings.host, settings.port)
    try:
        tokenizer = None if config.model.skip_tokenizer_init else _load_tokenizer(config)
        settings = complete_settings(config, settings)
        return asyncio.run(
            _serve(config, settings, tokenizer, listener, on_stage, on_ready), loop_factory=_loop_factory()
        )
    finally:
        listener.close()


def complete_settings(config: EngineConfig, settings: ServerSettings) -> ServerSettings:
    """`settings` with what follows from the engine's options: sampling defaults of the model, the limit on requests in flight."""
    changes: dict[str, object] = {}
    if not settings.default_sampling:
        changes["default_sampling"] = load_generation_defaults(config.model.path)
    scheduler = config.scheduler
    if settings.max_in_flight is None and scheduler.max_waiting is not None:
        changes["max_in_flight"] = scheduler.max_num_seqs + scheduler.max_waiting
    return replace(settings, **changes)  # type: ignore[arg-type]


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening. Raises `ServerStartError` naming the port when it is taken or not allowed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ServerStartError(f"The host '{host}' is not an address of this machine ({error.strerror}).") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServerStartError(_bind_problem(host, port, error)) from error
    listener.setblocking(False)
    return listener


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    tokenizer: Tokenizer | None,
    listener: socket.socket,
    on_stage: StageCallback | None,
    on_ready: Callable[[str, EngineInfo], None] | None,
) -> int:
    client = AsyncEngineClient(config) if on_stage is None else AsyncEngineClient(config, on_stage=on_stage)
    stop = asyncio.Event()
    with _signals(stop):
        starting = asyncio.create_task(client.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return EXIT_OK
        stopping.cancel()
        info = starting.result()  # raises EngineStartError
        died: list[str] = []

        def on_death(reason: str) -> None:
            died.append(reason)
            stop.set()

        app = create_app(client, tokenizer, settings, on_engine_death=on_death)
        server = _Server(_uvicorn_config(app, settings))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if on_ready is not None and not serving.done():
            on_ready(_url(listener, settings), info)
        await _wait_any(serving, stop)
        await _finish(server, serving, app.state.context, died)
    return EXIT_FAILURE if died else EXIT_OK


async def _finish(server: _Server, serving: asyncio.Task[None], context: ServerContext, died: list[str]) -> None:
    """Let what runs finish, cancel it after the time for that (or at the second signal), and wait for the server's end."""
    context.engine.draining = True
    in_flight = context.engine.num_in_flight
    if in_flight and not died:
        logger.info(
            "Shutting down: %d sequences get %g seconds to finish.", in_flight, context.settings.shutdown_timeout
        )
    server.should_exit = True
    done, _ = await asyncio.wait({serving}, timeout=context.settings.shutdown_timeout)
    if not done:
        logger.warning("%d sequences did not finish in time and are cancelled.", context.engine.num_in_flight)
        context.engine.cancel_all()
        done, _ = await asyncio.wait({serving}, timeout=_FLUSH_SECONDS)
    if not done:
        server.force_exit = True
        await asyncio.wait({serving}, timeout=_FLUSH_SECONDS)
    # With force_exit uvicorn leaves the lifespan out; shutting down twice does no harm.
    await context.engine.shutdown(drain=False)
    if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
        raise error


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `_signals` decides what a signal means."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        if stop.is_set():
            for number in handled:  # from now on the default action
                loop.remove_signal_handler(number)
        stop.set()

    for number in handled:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def _wait_any(serving: asyncio.Task[None], stop: asyncio.Event) -> None:
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


def _uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=settings.log_level,
        access_log=settings.access_log,
        log_config=None,
        lifespan="on",
        timeout_keep_alive=30,
        root_path=settings.root_path,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed: asyncio's own loop is used.")
        return None
    return uvloop.new_event_loop


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    given = config.model.tokenizer
    return load_tokenizer(config.model.path if given is None else Path(given))


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use: choose another with --port, or stop the program that has it."
    if error.errno == errno.EACCES:
        return f"Port {port} is reserved for the system's administrator: choose one above 1023 with --port."
    return f"The server cannot listen on {host}:{port} ({error.strerror})."


def _url(listener: socket.socket, settings: ServerSettings) -> str:
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{port}{settings.root_path}"


__all__ = ["EngineStartError", "ServerStartError", "complete_settings", "open_socket", "run"]

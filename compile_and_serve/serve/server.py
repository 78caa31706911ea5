"""Runs the API server from engine start to exit code: socket, signals, graceful shutdown, engine death."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.connection import EngineDeadError, EngineStartError
from compile_and_serve.runtime.engine.replicas import OwnEngine, make_client
from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.load_tokenizer import load_generation_defaults, load_model_tokenizer
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.app import create_app
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.engine.adapters import ServedAdapters
from compile_and_serve.serve.engine.engine import AsyncEngine
from compile_and_serve.serve.http.hosts import known_hosts
from compile_and_serve.serve.http.http_protocol import limited_protocol
from compile_and_serve.serve.http.listener import ServerStartError, bind_problem, claimed_address, inode_of, open_socket, open_unix_socket
from compile_and_serve.serve.served_parsers import served_parsers
from compile_and_serve.serve.settings import ServerSettings

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILURE = 0, 1
_FLUSH_SECONDS = 5.0  # time to send the answers of cancelled requests

StageCallback = Callable[[str, float, str], None]


def run(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    on_stage: StageCallback | None = None,
    on_ready: Callable[[str, EngineInfo], None] | None = None,
) -> int:
    """Start the engine, serve until SIGINT or SIGTERM, and stop. Returns the exit code: 0, or 1 if the engine died.

    on_stage: called with (stage, seconds, detail) during start-up. on_ready: called with (URL, engine info) once requests
    are accepted. Raises a `ValueError` with one sentence if the server cannot start: the port is in use, there is no
    tokenizer, or the model does not load.
    """
    with claimed_address(settings.host, settings.port, settings.uds):
        return _run(config, settings, on_stage, on_ready)


def _run(
    config: EngineConfig, settings: ServerSettings, on_stage: StageCallback | None, on_ready: Callable[[str, EngineInfo], None] | None
) -> int:
    listener = open_socket(settings.host, settings.port) if settings.uds is None else open_unix_socket(settings.uds)
    inode = None if settings.uds is None else inode_of(settings.uds)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, settings, listener, on_stage, on_ready))
    except OSError as error:
        # Another program may have begun to listen while the model was loading.
        if error.errno == errno.EADDRINUSE:
            raise ServerStartError(bind_problem(settings.host, settings.port, error)) from error
        raise
    finally:
        if settings.uds is not None and inode_of(settings.uds) == inode:  # else another server has replaced it
            settings.uds.unlink(missing_ok=True)
        listener.close()


def complete_settings(config: EngineConfig, settings: ServerSettings, templates: TemplatePool) -> ServerSettings:
    """`settings` with the chat template's source, the model's sampling defaults, and whether priorities are allowed.

    Raises a `ValueError` if the template or the defaults are invalid.
    """
    changes: dict[str, Any] = {"priorities": config.scheduler.policy == "priority"}
    if settings.chat_template is not None:
        template = changes["chat_template"] = read_chat_template(settings.chat_template)
        templates.check(template)
    if not settings.default_sampling:
        defaults: dict[str, Any] = _generation_defaults(config, settings) | dict(settings.override_sampling)
        if settings.repetition_detection is not None:
            defaults["repetition_detection"] = settings.repetition_detection
        changes["default_sampling"] = defaults
        try:
            SamplingParams(**defaults).verify()
        except ValueError as error:
            raise ServerStartError(
                f"The sampling defaults of generation_config.json and --override-generation-config cannot be used: {error}"
            ) from error
    return replace(settings, **changes)


def _generation_defaults(config: EngineConfig, settings: ServerSettings) -> dict[str, float | int]:
    """The sampling defaults of the file that --generation-config means."""
    if settings.generation_config == "vllm":
        return {}
    if settings.generation_config == "auto":
        return load_generation_defaults(config.model.path)
    folder = Path(settings.generation_config)
    if not (folder / "generation_config.json").is_file():
        raise ServerStartError(f"--generation-config must be auto, vllm or a folder with generation_config.json, got {str(folder)!r:.200}.")
    return load_generation_defaults(folder)


def read_chat_template(given: str) -> str:
    """The template's source: `given` itself if it is Jinja, else the content of the file `given`."""
    if "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ServerStartError(f"The chat template '{given:.200}' is neither Jinja source nor a readable text file.") from error


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    on_stage: StageCallback | None,
    on_ready: Callable[[str, EngineInfo], None] | None,
) -> int:
    client = make_client(config, on_stage)
    templates = TemplatePool()
    with _Signals() as signals, closing(templates):
        starting = asyncio.create_task(_start(client, config, settings, templates))
        await _wait_any(starting, signals.stop)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return EXIT_OK
        tokenizer, settings, adapters = starting.result()  # raises the start's error
        if settings.api_server_count > 1:
            return await _serve_with_processes(client, config, settings, listener, adapters, signals, on_ready)
        died: list[str] = []

        def on_death(reason: str) -> None:
            died.append(reason)
            signals.stop.set()

        app = create_app(
            client,
            tokenizer,
            settings,
            num_replicas=config.parallel.data_parallel_size,
            on_engine_death=on_death,
            templates=templates,
            adapters=adapters,
        )
        server, serving = await _begin(_uvicorn_config(app, settings), listener)
        if on_ready is not None and not serving.done():
            on_ready(_url(listener, settings), client.info)
        await _wait_any(serving, signals.stop)
        await _finish(server, serving, app.state.context, signals.hurry)
    return EXIT_FAILURE if died else EXIT_OK


async def _serve_with_processes(
    client: OwnEngine,
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    adapters: ServedAdapters,
    signals: _Signals,
    on_ready: Callable[[str, EngineInfo], None] | None,
) -> int:
    from compile_and_serve.serve.processes.many_processes import serve_with_processes

    url = _url(listener, settings)

    def ready() -> None:
        if on_ready is not None:
            on_ready(url, client.info)

    try:
        is_well = await serve_with_processes(
            client, config, settings, listener, adapters.all, stop=signals.stop, hurry=signals.hurry, on_ready=ready
        )
    finally:
        try:
            await client.shutdown(drain=False)
        except EngineDeadError as error:
            logger.warning("The engine did not shut down cleanly: %s", error)
    return EXIT_OK if is_well else EXIT_FAILURE


async def _start(
    client: OwnEngine, config: EngineConfig, settings: ServerSettings, templates: TemplatePool
) -> tuple[Tokenizer | None, ServerSettings, ServedAdapters]:
    """Start the engine and read the tokenizer at the same time, then load adapters. The first error stops all."""
    inode = None if settings.uds is None else inode_of(settings.uds)
    engine = asyncio.create_task(client.start())
    files = asyncio.create_task(asyncio.to_thread(_read_files, config, settings, templates))
    try:
        await asyncio.gather(engine, files)
        tokenizer, settings = files.result()
        InputProcessor(tokenizer, client.info)  # raises if the tokenizer does not fit the model
        adapters = ServedAdapters(client, settings.served_model_names, settings.lora_dir)
        for name, path in settings.lora_modules:
            await adapters.add(name, path)
        if settings.uds is not None and inode_of(settings.uds) != inode:
            raise ServerStartError(f"--uds {settings.uds} was removed or replaced while the model was loading: choose another path.")
    except BaseException:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await client.shutdown(drain=False)
        raise
    return tokenizer, settings, adapters


async def _begin(config: uvicorn.Config, listener: socket.socket) -> tuple[_Server, asyncio.Task[None]]:
    """A server and its task, once it takes connections or has failed."""
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    return server, serving


async def _finish(server: _Server, serving: asyncio.Task[None], context: ServerContext, hurry: asyncio.Event) -> None:
    """Let running requests finish, cancel them at the timeout or the second signal, and wait until the server has ended."""
    engine = context.engine
    if engine.dead_reason is not None:  # other replicas have requests to finish; new ones get 503 meanwhile
        await _until_idle(engine, hurry, context.settings.shutdown_timeout)
    engine.draining = True
    if engine.num_in_flight:
        seconds = context.settings.shutdown_timeout
        logger.info("Shutting down: %d sequences have %g seconds to finish.", engine.num_in_flight, seconds)
    server.should_exit = True
    await _wait_any(serving, hurry, timeout=context.settings.shutdown_timeout)
    if not serving.done():
        logger.warning("Cancelling %d sequences.", engine.num_in_flight)
        engine.cancel_all()
        await _wait_any(serving, timeout=_FLUSH_SECONDS)
    if not serving.done():
        server.force_exit = True
        await _wait_any(serving, timeout=_FLUSH_SECONDS)
    # With force_exit uvicorn skips the lifespan's shutdown. Shutting down twice is harmless.
    await engine.shutdown()
    if serving.done():
        await serving  # raises the server's error


async def _until_idle(engine: AsyncEngine, hurry: asyncio.Event, timeout: float) -> None:
    end = time.monotonic() + timeout
    while engine.num_in_flight and not hurry.is_set() and time.monotonic() < end:
        await asyncio.sleep(0.02)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which `_Signals` replaces."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Signals:
    """SIGINT and SIGTERM: the first signal sets `stop`, the second sets `hurry`, the third ends the process at once."""

    _HANDLED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> _Signals:
        for number in self._HANDLED:
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._HANDLED:
            self._loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
            self.__exit__()  # restore the default actions
        self.stop.set()


async def _wait_any(*awaited: asyncio.Task[Any] | asyncio.Event, timeout: float | None = None) -> None:
    """Wait until a task is done, an event is set, or `timeout` seconds have passed. Exceptions stay in the tasks."""
    waits = {task if isinstance(task, asyncio.Task) else asyncio.create_task(_set(task)) for task in awaited}
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits.difference(task for task in awaited if isinstance(task, asyncio.Task)):
        wait.cancel()


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def _uvicorn_config(app: FastAPI, settings: ServerSettings, *, plain: bool = False) -> uvicorn.Config:
    """plain: for a private socket, without TLS and without the application's lifespan."""
    config = uvicorn.Config(
        app,
        log_level=settings.log_level,
        access_log=False,  # `RequestMiddleware` writes it
        log_config=None,
        lifespan="off" if plain else "on",
        http=limited_protocol(settings.connection_limits, None if plain else known_hosts(settings)),
        ws="none",
        timeout_keep_alive=settings.connection_limits.idle_seconds,
        root_path=settings.root_path,
    )
    if settings.tls is not None and not plain:
        config.load()
        config.ssl = settings.tls.context()
    return config


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed: using asyncio's event loop.")
        return None
    return uvloop.new_event_loop


def _read_files(config: EngineConfig, settings: ServerSettings, templates: TemplatePool) -> tuple[Tokenizer | None, ServerSettings]:
    settings = complete_settings(config, settings, templates)
    if config.model.skip_tokenizer_init:
        served_parsers(None, settings)
        return None, settings
    tokenizer = load_model_tokenizer(config.model)
    if settings.chat_template is None and "default" in tokenizer.chat_templates:
        try:
            templates.check(tokenizer.chat_templates["default"])
        except ChatTemplateError as error:  # completions need no template
            logger.warning("Chat requests will be refused unless you set another --chat-template. %s", error)
    served_parsers(tokenizer, settings)  # raises now, not after the engine's start
    return tokenizer, settings


def _url(listener: socket.socket, settings: ServerSettings) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.tls is None else "https"
    return f"{scheme}://{host}:{port}{settings.root_path}"


__all__ = ["EngineStartError", "ServerStartError", "complete_settings", "open_socket", "run"]

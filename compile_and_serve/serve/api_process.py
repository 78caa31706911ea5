"""One of several API processes (`--api-server-count`): the application on the shared port, with a connection of its own to the engine.

Process 0 also listens on a private Unix socket. The other processes pass on to it what one process must do alone: stored responses,
loading adapters, sleeping and waking. It also counts the requests and tokens a minute of API keys that have limits of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from compile_and_serve.runtime.child_process import EXIT_FAILURE, describe_error, exit_at_once, read_bootstrap, set_up_child
from compile_and_serve.runtime.engine.replicas import ConnectedEngine, DataParallelClient, connect
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.serve.app import create_app
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.engine.adapters import ServedAdapters
from compile_and_serve.serve.errors import error_response, path_of
from compile_and_serve.serve.http.listener import open_socket, open_unix_socket
from compile_and_serve.serve.http.middleware import body_too_large
from compile_and_serve.serve.http.responses import until_disconnect
from compile_and_serve.serve.observe.metrics import MetricFamily
from compile_and_serve.serve.processes.api_bootstrap import ApiBootstrap
from compile_and_serve.serve.processes.reports import report
from compile_and_serve.serve.processes.siblings import Answer, SharedState, Siblings
from compile_and_serve.serve.server import _begin, _finish, _loop_factory, _read_files, _uvicorn_config, _wait_any
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.tenants.rate_limits import RateAnswer

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

_HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"trailer"})


class ForwardMiddleware:
    """Passes requests with these path prefixes on to process 0, and its responses back, byte for byte."""

    def __init__(self, app: ASGIApp, *, prefixes: tuple[str, ...], to: str, max_bytes: int) -> None:
        import httpx  # slow, and most servers forward nothing

        self.app = app
        self._max_bytes = max_bytes
        self._prefixes = prefixes
        self._http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=to, limits=httpx.Limits(max_connections=None)), timeout=None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not path_of(scope).startswith(self._prefixes):
            await self.app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_HEADERS]
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        # Process 0 adds the prefix of a proxy again.
        raw_path = scope["raw_path"].removeprefix(scope.get("root_path", "").encode())
        url = f"http://first{raw_path.decode('latin-1')}{query}"
        body, message = bytearray(), await receive()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                error = body_too_large(self._max_bytes)
                response = error_response(error.status_code, error.detail, headers=error.headers, path=path_of(scope))
                await response(scope, receive, send)
                return
            if not message.get("more_body"):
                break
            message = await receive()
        request = self._http.build_request(scope["method"], url, headers=headers, content=bytes(body))
        await until_disconnect(receive, self._answer(request, receive, send))

    async def _answer(self, request: httpx.Request, receive: Receive, send: Send) -> None:
        import httpx

        try:
            response = await self._http.send(request, stream=True)
        except httpx.TransportError:
            error = error_response(503, "The API process that answers this is being started again.", path=request.url.path)
            await error({"type": "http"}, receive, send)
            return
        try:
            headers = [(name.lower(), value) for name, value in response.headers.raw]
            kept = [pair for pair in headers if pair[0] not in _HOP_HEADERS and pair[0] not in (b"date", b"server")]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


async def _serve(bootstrap: ApiBootstrap) -> None:
    ready = asyncio.Event()
    try:
        await _run(bootstrap, ready)
    except Exception as error:
        logger.error("The API process failed.", exc_info=error)
        if not ready.is_set():
            report(str(error) if isinstance(error, ValueError) else describe_error(error))
        raise


async def _run(bootstrap: ApiBootstrap, ready: asyncio.Event) -> None:
    settings = bootstrap.settings
    stop, hurry = asyncio.Event(), asyncio.Event()
    siblings = Siblings(Path(bootstrap.folder), settings.api_server_count)
    with closing(TemplatePool()) as templates:
        name = f"api-{bootstrap.process}-{bootstrap.num_restarts}"  # the engine may still know the one that died
        client = connect(bootstrap.config, bootstrap.engine_folders, name, num_clients=settings.api_server_count)
        await client.start()
        tokenizer, settings = await asyncio.to_thread(_read_files, bootstrap.config, settings, templates)
        adapters = ServedAdapters(client, settings.served_model_names, settings.lora_dir, loaded=bootstrap.adapters, siblings=siblings)
        app = create_app(
            client,
            tokenizer,
            settings,
            num_replicas=bootstrap.config.parallel.data_parallel_size,
            templates=templates,
            adapters=adapters,
            process=bootstrap.process,
            siblings=siblings,
        )
        context = app.state.context
        answers = _answers(context, client, stop, hurry)
        if bootstrap.listener_fd is None:
            listener = open_socket(settings.host, settings.port, shared=True)
        else:
            listener = socket.socket(fileno=bootstrap.listener_fd)
        first = Path(bootstrap.folder) / "first"
        if bootstrap.process == 0:
            first_listener = open_unix_socket(first)
        elif prefixes := forwarded_prefixes(settings):
            app.add_middleware(ForwardMiddleware, prefixes=prefixes, to=str(first), max_bytes=settings.max_body_bytes)
        async with await siblings.listen(bootstrap.process, answers):
            if bootstrap.num_restarts:
                state = await siblings.state(bootstrap.process)
                adapters.restore(state.adapters, state.num_loads)
                context.engine.sleeping = state.is_sleeping
            server, serving = await _begin(_uvicorn_config(app, settings), listener)
            private = None
            if bootstrap.process == 0:
                private, private_task = await _begin(_uvicorn_config(app, settings, plain=True), first_listener)
            ready.set()
            report(None)
            await _wait_any(serving, stop)
            await _finish(server, serving, context, hurry)
            if private is not None:
                private.should_exit = private.force_exit = True
                await _wait_any(private_task, timeout=1.0)


def _answers(context: ServerContext, client: ConnectedEngine, stop: asyncio.Event, hurry: asyncio.Event) -> dict[str, Answer]:
    """What this process does when another one calls: see `Siblings`."""

    async def set_adapter(adapter: dict[str, Any], is_loaded: bool) -> None:
        context.adapters.changed(msgspec.convert(adapter, LoRARequest), is_loaded)

    async def state() -> SharedState:
        adapters = context.adapters
        return SharedState(adapters.all, adapters.num_loads, context.engine.sleeping)

    async def metrics() -> list[MetricFamily]:
        return context.metrics.families()

    async def load() -> tuple[int, int, int]:
        tokens = context.metrics.tokens
        return tokens.prompt, tokens.generation, context.metrics.num_held

    async def begin_request(name: str) -> RateAnswer:
        return await context.rates.begin(name)

    async def use_tokens(name: str, num_tokens: int) -> None:
        await context.rates.use(name, num_tokens)

    async def engine_died(reason: str, dead_replicas: list[int]) -> None:
        client.die(reason, dead_replicas)

    async def replica_died(index: int, reason: str) -> None:
        assert isinstance(client, DataParallelClient)
        await client.replica_died(index, reason)

    async def replica_back(index: int) -> None:
        assert isinstance(client, DataParallelClient)
        await client.replica_back(index)

    async def stop_serving(in_a_hurry: bool) -> None:
        stop.set()
        if in_a_hurry:
            hurry.set()

    set_sleeping = context.engine.set_sleeping
    told = (set_sleeping, set_adapter, state, metrics, load, begin_request, use_tokens, engine_died, stop_serving)
    return {one.__name__: one for one in (*told, replica_died, replica_back)}


def forwarded_prefixes(settings: ServerSettings) -> tuple[str, ...]:
    """Paths that only process 0 answers."""
    prefixes = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter") if settings.lora_dir is not None else ()
    if settings.admin_routes:
        prefixes = (*prefixes, "/sleep", "/wake_up")
    return (*prefixes, "/v1/responses") if settings.response_store_bytes else prefixes


def main() -> NoReturn:
    """Entry point of an API process."""
    bootstrap: ApiBootstrap = read_bootstrap()
    set_up_child(
        who=f"API process {bootstrap.process}", log_level=bootstrap.log_level, folder=bootstrap.folder, log_format=bootstrap.log_format
    )
    status = 0
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(bootstrap))
    except BaseException:
        status = EXIT_FAILURE
    with contextlib.suppress(Exception):
        logging.shutdown()
    exit_at_once(status)

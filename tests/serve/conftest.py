"""The application with a scripted engine, and an HTTP client for it in this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI

from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.app import create_app
from compile_and_serve.serve.settings import ServerSettings
from tests.support.fake_engine import FakeEngineClient, Script, says
from tests.support.tokenizers import byte_level_tokenizer

ANSWER = "Hello there, 🙂 wörld!"


@dataclass
class Server:
    """One running application."""

    app: FastAPI
    engine: FakeEngineClient
    http: httpx.AsyncClient
    tokenizer: Tokenizer
    deaths: list[str]
    close: Callable[[], Awaitable[None]]
    """Ends the application's lifespan before the test is over."""

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, **fields})


StartServer = Callable[..., Any]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer([ANSWER, "the quick brown fox"])


@pytest.fixture(scope="session")
def templates() -> Iterator[TemplatePool]:
    """One pool for all tests, because a process takes a while to start."""
    pool = TemplatePool()
    yield pool
    pool.close()


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[None]:
    async with app.router.lifespan_context(app):
        yield


@pytest.fixture(autouse=True)
def fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests look at /metrics more than once a second."""
    monkeypatch.setattr("compile_and_serve.serve.observe.rendered.MAX_AGE_SECONDS", 0.0)


@pytest_asyncio.fixture
async def start_server(tokenizer: Tokenizer, templates: TemplatePool) -> AsyncIterator[StartServer]:
    """Start an application: `await start_server(script=..., engine={...}, **settings)`."""
    async with AsyncExitStack() as stack:

        async def start(
            *,
            script: Script | None = None,
            engine: dict[str, Any] | None = None,
            with_tokenizer: Tokenizer | None = tokenizer,
            pool: TemplatePool = templates,
            **settings: Any,
        ) -> Server:
            client = FakeEngineClient(tokenizer, script or says(tokenizer, ANSWER), **(engine or {}))
            deaths: list[str] = []
            options = {"served_model_names": ("test-model", "alias"), **settings}
            app = create_app(client, with_tokenizer, ServerSettings(**options), on_engine_death=deaths.append, templates=pool)
            running = await stack.enter_async_context(AsyncExitStack())
            await running.enter_async_context(_running(app))
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://server"))
            return Server(app, client, http, tokenizer, deaths, running.aclose)

        yield start


@pytest_asyncio.fixture
async def over_tcp() -> AsyncIterator[Callable[[Server], Any]]:
    """Serve an application on a TCP port, for tests of connections: `url = await over_tcp(server)`."""
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def serve(server: Server) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(server.app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        web = uvicorn.Server(config)
        web.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
        running.append((web, asyncio.create_task(web.serve(sockets=[listener]))))
        while not web.started:
            await asyncio.sleep(0.005)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for web, task in running:
        web.should_exit = True
        await task


async def eventually(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Wait until `condition()` holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def server(start_server: StartServer) -> Server:
    return await start_server()

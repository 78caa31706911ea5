"""JSON answers, event streams, and work that is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_CLIENT_CLOSED = 499  # only for the access log: the connection is already closed


class ClientGoneError(Exception):
    """The client disconnected before its answer was ready."""


def json_response(value: Any) -> Response:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. on_close runs when the response has ended, also when the client disconnected."""

    def __init__(self, events: AsyncIterator[bytes], *, on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream; charset=utf-8", headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and `ClientGoneError` is raised.

    The request's body must already have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        watcher.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def client_gone_response() -> Response:
    """The response that a handler returns after the client disconnected."""
    return Response(status_code=_CLIENT_CLOSED)

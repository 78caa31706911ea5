"""JSON answers, event streams, and work that is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Response
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_CLIENT_CLOSED = 499  # only for the access log: the connection is already closed


def json_response(value: Any) -> Response:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, /, **fields: Any) -> bytes:
    """One server-sent event with its name, which `type` in its JSON repeats."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode({"type": name, **fields}) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, with a comment in long silences (`--stream-keepalive`), so that proxies keep the connection.

    on_close runs when the response has ended, also when the client disconnected.
    """

    def __init__(self, events: AsyncIterator[bytes], *, on_close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream; charset=utf-8", headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = scope["app"].state.context.settings.stream_keepalive
        keepalive = _KeepAlive(send, seconds) if seconds else None
        try:
            await super().__call__(scope, receive, send if keepalive is None else keepalive.send)
        finally:
            if keepalive is not None:
                keepalive.stop()
            self._on_close()


class _KeepAlive:
    """Passes a stream's messages on, and sends a comment after `seconds` without one."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Send the stream's next message."""
        if self._comment is not None:
            await asyncio.wait([self._comment])
        loop = asyncio.get_running_loop()
        if not message.get("more_body", True):
            self.stop()
        await self._send(message)
        self._last = loop.time()
        if self._timer is None and message.get("more_body"):
            self._timer = loop.call_later(self._seconds, self._check)

    def stop(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
        self._seconds = 0.0

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        silence = loop.time() - self._last
        if not self._seconds:
            return
        if silence >= self._seconds:
            self._comment = loop.create_task(self._send_comment())
            silence = 0.0
        self._timer = loop.call_later(self._seconds - silence, self._check)

    async def _send_comment(self) -> None:
        try:
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        except OSError:
            pass  # the client has gone, which the stream notices too
        finally:
            self._last = asyncio.get_running_loop().time()
            self._comment = None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`. If the client disconnects first, `work` is cancelled and the result is None.

    receive: of a request whose body has been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watcher.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def client_gone_response() -> Response:
    """The response that a handler returns after the client disconnected."""
    return Response(status_code=_CLIENT_CLOSED)

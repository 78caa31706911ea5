"""ASGI middleware: refusals wait, so that a client which asks again and again without waiting takes little of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.serve.http.middleware import tenant_digest

FREE_PER_SECOND = 20.0  # refusals of a key or an address that do not wait; as many may come at once
WAIT_SECONDS = 1.0  # no more than the shortest `Retry-After`
_MAX_WAITING = 1000  # of a key or an address; further ones do not wait, because each takes memory
_MAX_KNOWN = 10_000  # keys and addresses
_WRONG_KEY, _NO_ROOM = (401, 403), (429, 503)


class _Refused:
    """A key's or an address's. allowance: refusals that need not wait, at the time `at`."""

    __slots__ = ("allowance", "at", "num_waiting")

    def __init__(self, now: float) -> None:
        self.allowance, self.at, self.num_waiting = FREE_PER_SECOND, now, 0

    def has_to_wait(self, now: float) -> bool:
        self.allowance = min(FREE_PER_SECOND, self.allowance + (now - self.at) * FREE_PER_SECOND)
        self.at = now
        if self.allowance >= 1.0:
            self.allowance -= 1.0
            return False
        return self.num_waiting < _MAX_WAITING


class RefusalMiddleware:
    """Answers of 401 and 403, and of 429 and 503 to a POST request, wait a second once a key or an address has had many of them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._refused: OrderedDict[str, _Refused] = OrderedDict()  # the least recently refused first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_later(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                if status in _WRONG_KEY or (status in _NO_ROOM and scope["method"] == "POST"):
                    await self._wait(tenant_digest(scope) or _address(scope))
            await send(message)

        await self.app(scope, receive, send_later)

    async def _wait(self, whose: str) -> None:
        now = time.monotonic()
        refused = self._refused.setdefault(whose, _Refused(now))
        self._refused.move_to_end(whose)
        if len(self._refused) > _MAX_KNOWN:
            self._refused.popitem(last=False)
        if refused.has_to_wait(now):
            refused.num_waiting += 1
            try:
                await asyncio.sleep(WAIT_SECONDS)
            finally:
                refused.num_waiting -= 1


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""

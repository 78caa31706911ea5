"""`FairTurns`: work of which only some pieces run at a time, by turns of the API keys."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from compile_and_serve.serve.tenants.current import tenant_name


class FairTurns:
    """Up to `limit` pieces of work run at a time. Those that wait are taken key by key, one of each in turn: a key with many delays another
    by no more than one piece.
    """

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by key; the next one first

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the current tenant's turn, and hold it."""
        await self._wait(tenant_name())
        try:
            yield
        finally:
            self._end()

    async def _wait(self, key: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        granted = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(key, deque())
        queue.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._end()  # the turn came, and nobody takes it
            raise

    def _end(self) -> None:
        """Pass the turn on."""
        while self._waiting:
            key, queue = next(iter(self._waiting.items()))
            granted = queue.popleft()
            if queue:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1

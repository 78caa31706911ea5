"""`AudioRoom`: bounds the seconds of decoded audio that a server holds at a time."""

from __future__ import annotations

import asyncio
from collections import deque


class AudioRoom:
    """Takers come in the order in which they ask. seconds: all that may be held at a time."""

    def __init__(self, seconds: float) -> None:
        self._free = seconds
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()

    async def take(self, seconds: float) -> None:
        """Wait until there is room for `seconds`, and hold them."""
        if not self._waiting and seconds <= self._free:
            self._free -= seconds
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((seconds, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(seconds)  # it came, and nobody takes it
            else:
                self.give_back(0.0)  # those behind may have room now
            raise

    def give_back(self, seconds: float) -> None:
        """Hold less."""
        self._free += seconds
        while self._waiting:
            wanted, granted = self._waiting[0]
            if not granted.done():
                if wanted > self._free:
                    return
                self._free -= wanted
                granted.set_result(None)
            self._waiting.popleft()

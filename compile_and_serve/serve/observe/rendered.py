"""`RenderedMetrics`: the text of /metrics, which many readers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

MAX_AGE_SECONDS = 1.0


class RenderedMetrics:
    """Rendering takes milliseconds in which the event loop does nothing else. So it happens at most once a second, however many read."""

    def __init__(self, render: Callable[[], Awaitable[bytes]]) -> None:
        self._render = render
        self._lock = asyncio.Lock()
        self._text, self._rendered_at = b"", float("-inf")

    async def text(self) -> bytes:
        """The text, up to a second old. Raises what `render` raises."""
        async with self._lock:
            if time.monotonic() - self._rendered_at >= MAX_AGE_SECONDS:
                self._text = await self._render()
                self._rendered_at = time.monotonic()
            return self._text

"""`RenderedMetrics`: the text of /metrics, which many readers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

MAX_AGE_SECONDS = 1.0
MAX_READS = 20  # of one text


class RenderedMetrics:
    """Rendering takes milliseconds in which the event loop does nothing else. So it happens at most once a second, however many read.
    Once a text was read `MAX_READS` times, further readers wait for the next one.
    """

    def __init__(self, render: Callable[[], Awaitable[bytes]]) -> None:
        self._render = render
        self._lock = asyncio.Lock()
        self._text, self._rendered_at, self._num_reads = b"", float("-inf"), 0

    async def text(self) -> bytes:
        """The text, up to a second old. Raises what `render` raises."""
        async with self._lock:  # whoever comes later waits behind whoever waits
            age = time.monotonic() - self._rendered_at
            if age < MAX_AGE_SECONDS and self._num_reads >= MAX_READS:
                await asyncio.sleep(MAX_AGE_SECONDS - age)
                age = MAX_AGE_SECONDS
            if age >= MAX_AGE_SECONDS:
                self._text, self._num_reads = await self._render(), 0
                self._rendered_at = time.monotonic()
            self._num_reads += 1
            return self._text

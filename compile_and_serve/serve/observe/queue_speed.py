"""`QueueSpeed`: how long a refused client should wait, from how fast sequences have been finishing."""

from __future__ import annotations

import math
from collections import deque

from compile_and_serve.serve.errors import QueueFullError

_WINDOW = 30.0  # seconds
MIN_SECONDS, MAX_SECONDS = 1, 120


class QueueSpeed:
    """Counts ends of sequences in the last 30 seconds. Times are of time.monotonic."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()
        self._total = 0
        self._busy_since: float | None = None

    def started(self, now: float) -> None:
        """A sequence was sent to the engine."""
        if self._busy_since is None:
            self._busy_since = now

    def finished(self, count: int, now: float, *, in_flight: int) -> None:
        """Sequences have ended and `in_flight` are left."""
        self._forget_before(now - _WINDOW)
        if self._ends and self._ends[-1][0] == now:
            self._ends[-1] = now, self._ends[-1][1] + count
        else:
            self._ends.append((now, count))
        self._total += count
        if in_flight == 0:
            self._busy_since = None

    def seconds_until(self, count: int, now: float) -> int:
        """Whole seconds until `count` more sequences have ended, if they go on ending as fast: 1 to 120."""
        self._forget_before(now - _WINDOW)
        busy = 0.0 if self._busy_since is None else min(_WINDOW, now - self._busy_since)
        if self._total == 0:
            seconds = busy  # none has ended yet, so one takes at least as long as they have run
        else:
            seconds = count * (busy or now - self._ends[0][0]) / self._total
        return min(MAX_SECONDS, max(MIN_SECONDS, math.ceil(seconds)))

    def refusal(self, count: int, limit: int, now: float, *, in_flight: int, share: float = 1.0) -> QueueFullError:
        """The answer to a request with `count` sequences that would exceed the server's limit. share: of the ends that are counted here."""
        message = f"{in_flight} sequences wait or run and this request adds {count}, but the server accepts {limit}: try again later."
        return QueueFullError(message, self.seconds_until(math.ceil((in_flight + count - limit) * share), now))

    def _forget_before(self, time: float) -> None:
        while self._ends and self._ends[0][0] < time:
            self._total -= self._ends.popleft()[1]

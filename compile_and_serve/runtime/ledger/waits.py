"""How long requests wait, and for what. A queue has one clock; a request reads it twice, and is not visited in between."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from compile_and_serve.runtime.ledger.records import Preparation, WaitReason


class WaitClock:
    """The time that the head of a queue has waited, by reason. reason: for which it waits now."""

    __slots__ = ("_seconds", "_since", "reason")

    def __init__(self) -> None:
        self.reason: WaitReason = "step"
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def turn(self, reason: WaitReason, now: float) -> None:
        """From `now` (time.monotonic()) on, the reason is this one."""
        if reason != self.reason:
            self._seconds[self.reason] = self._seconds.get(self.reason, 0.0) + now - self._since
            self.reason, self._since = reason, now

    def read(self, now: float) -> dict[str, float]:
        """Seconds by reason, up to `now`."""
        seconds = self._seconds.copy()
        seconds[self.reason] = seconds.get(self.reason, 0.0) + now - self._since
        return seconds


class RequestClock:
    """The waits of one request, and the times of its prefills. transport, preparing, queue, prefill, preempted, recomputed: of
    `RequestLedger`.
    """

    __slots__ = (
        "_before",
        "_clock",
        "_own_reason",
        "_own_since",
        "_preempted_at",
        "_started",
        "preempted",
        "prefill",
        "preparing",
        "queue",
        "ready_at",
        "recomputed",
        "transport",
    )

    def __init__(self, clock: WaitClock, transport: float, now: float, *, held: float = 0.0) -> None:
        """held: seconds in which no engine had a free batch slot, so that it was not sent to one."""
        self.transport = transport
        self.preparing: dict[str, float] = {}
        self.queue: dict[str, float] = {"slots": held} if held else {}
        self.prefill: float | None = None
        self.preempted = self.recomputed = 0.0
        self._started = 0.0  # first, until the prefill is over; then last
        self.ready_at: float | None = None  # when the last preparation ended
        self._preempted_at: float | None = None
        self._own_reason: WaitReason | None = None
        self._own_since = 0.0
        self._clock = clock
        self._before = clock.read(now)

    def preempt(self, clock: WaitClock, now: float) -> None:
        """It lost its blocks and waits again."""
        self._clock, self._before = clock, clock.read(now)
        if self._preempted_at is None:  # it may have lost its scheduler as well
            self._preempted_at = now

    def move(self, clock: WaitClock, now: float) -> None:
        """It waits in another scheduler's queue from now on."""
        self.consider(now)
        self._close(now)
        self._clock, self._before = clock, clock.read(now)

    def prepare(self, what: Preparation, future: Future[Any]) -> None:
        """The request waits for `future`, and its place in the queue does not matter meanwhile."""
        began = time.monotonic()
        self._close(began)

        def note(_: Future[Any]) -> None:  # in any thread
            now = time.monotonic()
            self.preparing[what] = self.preparing.get(what, 0.0) + now - began
            self.ready_at = now

        future.add_done_callback(note)

    def is_ready_again(self, now: float) -> None:
        """It was prepared, and the scheduler has seen it: it waits for its turn from now on."""
        if self.ready_at is not None:
            self._add("step", now - self.ready_at)
            self._before, self.ready_at = self._clock.read(now), None

    def wait_alone(self, reason: WaitReason, now: float) -> None:
        """It waits for something that the others in its queue do not wait for, until the scheduler considers it again."""
        if reason != self._own_reason:
            self._close(now)
            self._own_reason, self._own_since = reason, now

    def consider(self, now: float) -> None:
        """The scheduler looks whether it can start."""
        self.is_ready_again(now)
        if self._own_reason is not None:
            self._add(self._own_reason, now - self._own_since)
            self._own_reason, self._before = None, self._clock.read(now)

    def start(self, now: float) -> None:
        """It runs."""
        self.consider(now)
        self._close(now)
        if self._preempted_at is not None:
            self.preempted += now - self._preempted_at
            self._preempted_at = None
        if self.prefill is not None or not self._started:
            self._started = now

    def end_prefill(self, now: float) -> None:
        """All tokens that it had are computed, the first time or again."""
        if self.prefill is None:
            self.prefill = now - self._started
        else:
            self.recomputed += now - self._started

    def _close(self, now: float) -> None:
        """Take over what the queue has waited since this request began to wait."""
        after = self._clock.read(now)
        for reason, seconds in after.items():
            if (waited := seconds - self._before.get(reason, 0.0)) > 0.0:
                self._add(reason, waited)
        self._before = after

    def _add(self, reason: str, seconds: float) -> None:
        self.queue[reason] = self.queue.get(reason, 0.0) + seconds

"""The engine process's heartbeat: API processes answer `/health` from the last one, without waiting for the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from compile_and_serve.runtime.distributed.executor import STUCK_SECONDS
from compile_and_serve.runtime.messages import Heartbeat

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0  # without a heartbeat for this long, the engine is unhealthy


def heartbeat_address(folder: str) -> str:
    """The ZMQ address at which an engine publishes heartbeats. folder: where its sockets lie."""
    return f"ipc://{folder}/heartbeat"


class HeartbeatSender:
    """Sends a `Heartbeat` every second from a thread of its own, so that a long step does not delay it. folder: where its socket lies.

    `close` ends the thread; it must be called before the ZMQ context is terminated.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self._context = context
        self._address = heartbeat_address(folder)
        self._turn_began: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send the first heartbeat soon, then one a second."""
        self._thread.start()

    def begin_turn(self) -> None:
        """The engine's loop begins another turn. Heartbeats carry its age: of a step, of an idle task, of what a message asks for.

        With several ranks, a step waits for their answer, so that a hung rank shows in the age too.
        """
        self._turn_began = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The body waits for a message, which is no work."""
        self._turn_began = None
        try:
            yield
        finally:
            self._turn_began = time.monotonic()

    def close(self) -> None:
        """Stop sending."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with self._context.socket(zmq.PUB) as socket:  # a ZMQ socket belongs to one thread
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(self._address)
            while True:
                began = self._turn_began
                age = 0.0 if began is None else time.monotonic() - began
                socket.send(msgspec.msgpack.encode(Heartbeat(turn_seconds=age)))
                if self._closing.wait(HEARTBEAT_SECONDS):
                    return


class HeartbeatMonitor:
    """A client's view of an engine's heartbeats."""

    def __init__(self) -> None:
        self._received_at = time.monotonic()
        self._turn_seconds = 0.0

    def receive(self, heartbeat: Heartbeat) -> None:
        """Note a heartbeat that has just arrived."""
        self._received_at, self._turn_seconds = time.monotonic(), heartbeat.turn_seconds

    def problem(self) -> str | None:
        """One sentence if the engine is silent or its loop is stuck; None if all is well."""
        silence = time.monotonic() - self._received_at
        if silence > SILENCE_SECONDS:
            return f"The engine process has sent no heartbeat for {silence:.0f} seconds."
        if self._turn_seconds > STUCK_SECONDS:
            return f"The engine has been busy with one step or message for {self._turn_seconds:.0f} seconds (limit: {STUCK_SECONDS:g})."
        return None

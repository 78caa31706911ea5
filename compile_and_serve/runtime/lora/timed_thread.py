"""`TimedThread`: a thread that runs calls one after another, and is replaced when one of them does not end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from compile_and_serve.runtime.lora.errors import AdapterError

_MOST_STUCK = 8  # threads

Result = TypeVar("Result")


class _Shared:
    """What the threads hold: not the `TimedThread`, whose end ends them."""

    def __init__(self, name: str, seconds: float, initializer: Callable[[], None]) -> None:
        self.name, self.seconds, self.initializer = name, seconds, initializer
        self.calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.stuck: list[threading.Thread] = []


class TimedThread(Generic[Result]):
    """Calls wait for each other. One that takes longer than `seconds` fails with `AdapterError`, and a new thread runs those that wait.

    The thread of a call that never ends (a network file system can hold it) stays until the call or the process ends. While there are
    8 of them, every call fails at once. initializer: runs first in each thread.
    """

    def __init__(self, name: str, seconds: float, initializer: Callable[[], None]) -> None:
        self._shared = _Shared(name, seconds, initializer)
        _start(self._shared)
        weakref.finalize(self, self._shared.calls.put, None)

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call in the thread."""
        future: Future[Result] = Future()
        self._shared.calls.put((call, future))
        return future


def _start(shared: _Shared) -> None:
    # A daemon: the process ends although a call does not.
    threading.Thread(target=_run, args=(shared,), name=shared.name, daemon=True).start()


def _run(shared: _Shared) -> None:
    shared.initializer()
    while (entry := shared.calls.get()) is not None:
        call, future = entry
        shared.stuck = [thread for thread in shared.stuck if thread.is_alive()]
        if len(shared.stuck) >= _MOST_STUCK:
            future.set_exception(AdapterError(f"{_MOST_STUCK} earlier adapters are still being read: is their disk gone?"))
            continue
        timer = threading.Timer(shared.seconds, _give_up, (shared, future, threading.current_thread()))
        timer.daemon = True
        timer.start()
        try:
            result, error = call(), None
        except BaseException as raised:
            result, error = None, raised
        timer.cancel()
        try:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        except InvalidStateError:
            return  # it came too late, and another thread runs
        del entry, call, future, timer, result, error  # while this thread waits, they belong to nobody


def _give_up(shared: _Shared, future: Future[Any], thread: threading.Thread) -> None:
    try:
        future.set_exception(AdapterError(f"The adapter could not be read within {shared.seconds:g} seconds."))
    except InvalidStateError:
        return
    shared.stuck.append(thread)
    _start(shared)

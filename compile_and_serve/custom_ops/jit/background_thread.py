"""Background threads of the lowest priority."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

LOWEST = 19

_threads: list[threading.Thread] = []  # of the process, whichever engine started them


def run_in_background(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run work in a daemon thread. On Linux, the thread and the programs that it starts have the lowest priority."""

    def run() -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                # Sets this thread's priority alone; the programs that it starts inherit it.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.append(thread)
    return thread


def num_running() -> int:
    """How many of these threads still work."""
    if _threads:
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
    return len(_threads)

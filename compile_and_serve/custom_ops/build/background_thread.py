"""Work beside a running process: threads that nobody waits for, at the lowest priority."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

LOWEST = 19


def run_in_background(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run work in a thread that does not keep the process from ending. The thread, and the programs that it runs, get the time that
    nothing else wants (on Linux; elsewhere a thread has no priority of its own).
    """

    def run() -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                # Of this thread alone; the programs that it starts inherit it.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread

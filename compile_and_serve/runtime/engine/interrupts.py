"""Ctrl-C that waits for the end of what must not be broken off in the middle."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptWaits:
    """Inside, the first Ctrl-C is kept until the block ends, which then raises `KeyboardInterrupt`; a second one breaks the block off.

    Only where Ctrl-C would raise it: in a process's main thread, under Python's own handler.
    """

    def __enter__(self) -> None:
        self._was_pressed = False
        is_main = threading.current_thread() is threading.main_thread()
        self._holds = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._press)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._was_pressed and error is None:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self._was_pressed:
            signal.default_int_handler(number, frame)
        self._was_pressed = True

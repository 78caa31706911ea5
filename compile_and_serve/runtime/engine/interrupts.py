"""Delay Ctrl-C until the end of work that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferInterrupt:
    """Within the block, the first Ctrl-C is deferred: `KeyboardInterrupt` is raised at the block's end. A second Ctrl-C
    interrupts the block.

    Does nothing outside the main thread, or if the process has its own handler of SIGINT.
    """

    def __enter__(self) -> None:
        self._is_pending = False
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_active = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_active:
            signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_pending and error is None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True

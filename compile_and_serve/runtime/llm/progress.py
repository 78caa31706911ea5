"""The progress bar of `LLM`."""

from __future__ import annotations

import time
from typing import Any

_REFRESH_SECONDS = 0.1


class Progress:
    """A progress bar with finished requests and tokens per second, if `show`."""

    def __init__(self, total: int, show: bool) -> None:
        self._prompt_tokens = self._new_tokens = 0
        self._began = time.monotonic()
        self._next_update = 0.0
        self._bar: Any = None
        if not show:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),  # stdout belongs to the caller
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("Prompts", total=total, speed="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._show_speed(time.monotonic())
            self._bar.stop()

    def prompt_done(self, num_tokens: int) -> None:
        self._prompt_tokens += num_tokens

    def tokens(self, num_tokens: int) -> None:
        self._new_tokens += num_tokens
        now = time.monotonic()
        if now >= self._next_update:
            self._next_update = now + _REFRESH_SECONDS
            self._show_speed(now)

    def _show_speed(self, now: float) -> None:
        if self._bar is not None:
            seconds = max(now - self._began, 1e-3)
            speed = f"in {self._prompt_tokens / seconds:.0f} tok/s, out {self._new_tokens / seconds:.0f} tok/s"
            self._bar.update(self._task, speed=speed)

    def request_done(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

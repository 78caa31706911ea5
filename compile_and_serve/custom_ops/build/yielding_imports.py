"""Importing a large package in a thread without slowing down steps.

Each kernel launch releases the interpreter's lock, which the importing thread then takes. A step of 300 launches would take as long as the
import. So the thread begins no module while a step is launched. It goes on while the device computes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MAX_WAIT = 0.25  # seconds for each module, so that an import ends whatever the steps do

_no_launch = threading.Event()
_no_launch.set()


@contextmanager
def launching() -> Iterator[None]:
    """A step is launched inside."""
    _no_launch.clear()
    try:
        yield
    finally:
        _no_launch.set()


@contextmanager
def yielding_imports() -> Iterator[None]:
    """Inside, this thread's imports wait before each module while a step is launched, `MAX_WAIT` at most."""
    finder = _YieldingFinder(threading.get_ident())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _YieldingFinder:
    """Finds modules on the path for one thread. It must not wait itself: the interpreter's import lock is held while it runs."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if threading.get_ident() != self._thread:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(_exec_between_launches, loader.exec_module)
        return spec


def _exec_between_launches(exec_module: Any, module: ModuleType) -> None:
    _no_launch.wait(MAX_WAIT)
    exec_module(module)

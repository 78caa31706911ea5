"""The garbage collector. Imports nothing of ours, and no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1000  # at most, at the interpreter's start: 375 objects of Python 3.12


@contextmanager
def no_garbage_collection(*, stays: bool = False) -> Iterator[None]:
    """Switch off the garbage collector for the block.

    Imports, tracing and rewriting create hundreds of thousands of objects that stay alive, which it would search again and again.
    stays: what the block creates stays alive, as modules do. It counts as old afterwards, so that it is searched with the oldest objects
    instead of at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if stays and gc.get_freeze_count() <= _FROZEN_BY_PYTHON:  # else what others froze would be unfrozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()

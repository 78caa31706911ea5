"""Folders that one process fills and all workers of a test run share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, filled by `make` in whichever process comes first; the others wait for it. Nobody may change it afterwards."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that failed
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder

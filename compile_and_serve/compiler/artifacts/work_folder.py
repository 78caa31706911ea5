"""Temporary folders that a later start removes if their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = ".in-use"  # a file in the folder that its process keeps locked


class WorkFolder(tempfile.TemporaryDirectory[str]):
    """A `TemporaryDirectory` that is locked while its process lives.

    Creating one first removes the folders with the same prefix whose processes were killed.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        _sweep(parent or Path(tempfile.gettempdir()), prefix)
        super().__init__(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        unlocked = Path(self.name) / f"{_LOCK}-soon"
        self._lock = os.fdopen(os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600))
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(Path(self.name) / _LOCK)  # once it is locked, so that no other process sees it unlocked

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


def is_in_use(folder: Path) -> bool:
    """Whether the process that created a `WorkFolder` is alive."""
    try:
        with (folder / _LOCK).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _sweep(parent: Path, prefix: str) -> None:
    with contextlib.suppress(OSError):  # of other users, or on a read-only disk
        for folder in parent.glob(f"{prefix}*"):
            is_ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            if is_ours and (folder / _LOCK).exists() and not is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)

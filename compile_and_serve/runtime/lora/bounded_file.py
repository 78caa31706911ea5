"""Files of people who may be hostile: regular files only, of a bounded size, read within a time."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Self

from compile_and_serve.runtime.lora.errors import AdapterError

_CHUNK = 4 << 20  # bytes


class BoundedFile:
    """A regular file, open for reading. It is never mapped: a mapped file that somebody cuts ends the process.

    deadline: by `time.monotonic`; reads raise `AdapterError` afterwards. size: in bytes. stamp: differs when the file has changed.
    Construction raises `AdapterError` for what is no regular file, and `OSError`.
    """

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self._deadline = path, deadline
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened, which may do something to a device
            raise AdapterError(f"{path} is not a regular file.")
        # O_NONBLOCK: opening a pipe, which may have replaced the file since, must not wait for its writer.
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._file)
            raise AdapterError(f"{path} is not a regular file.")
        self.size, self.stamp = status.st_size, (status.st_mtime_ns, status.st_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def read(self, offset: int, count: int) -> bytearray:
        """Exactly these bytes. Raises `AdapterError` if the file ends before, or at the deadline."""
        content = bytearray(count)
        target, done = memoryview(content), 0
        while done < count:
            self.check_time()
            read = os.preadv(self._file, [target[done : done + _CHUNK]], offset + done)
            if not read:
                raise AdapterError(f"{self.path} is truncated.")
            done += read
        return content

    def check_time(self) -> None:
        """Raise `AdapterError` after the deadline."""
        if time.monotonic() > self._deadline:
            raise AdapterError(f"{self.path} could not be read in time.")

    def check_unchanged(self) -> None:
        """Raise `AdapterError` if the file has changed since it was opened."""
        status = os.fstat(self._file)
        if (status.st_mtime_ns, status.st_size) != self.stamp:
            raise AdapterError(f"{self.path} changed while it was read: load it again.")

"""`DiskFolder`: contents of the KV cache as files, by key. No torch: a writer may be a small process.

A file is written under another name and renamed once it is complete, so a process that dies leaves no half of one under its name. A header
repeats what it is, and a checksum finds what was damaged. Several engines may share a folder: files with one name have one content.

    FOLDER / fingerprint (hex) / first byte of the key (hex) / key (hex) . rank
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

HEADER_BYTES = 4096  # a file's content begins at a multiple of what direct reads need
_MAGIC = b"cas-kv1\n"
_HEADER = struct.Struct("<8s32sQQHH")  # magic, fingerprint, bytes of content, its checksum, rank, bytes of the key, which follows
_TEMPORARY = ".part"
_STALE_SECONDS = 3600.0  # a temporary file that is older was left by a process that died
_FREED_SHARE = 0.1  # of the limit: room that is made at a time

Buffer = memoryview


class BadFileError(OSError):
    """A file is not what its name says. The message is one sentence."""


class DiskFolder:
    """root: created if it is missing. fingerprint: 32 bytes, of all that contents depend on beside their keys. rank: whose part it is.
    limit: bytes of all files in `root`, those of other fingerprints and other engines among them.
    """

    def __init__(self, root: Path, fingerprint: bytes, rank: int, limit: int) -> None:
        self._root, self._fingerprint, self._rank, self._limit = root, fingerprint, rank, limit
        self._folder = root / fingerprint.hex()[:32]
        self._headers = threading.local()
        self._is_direct = hasattr(os, "O_DIRECT")
        self._written = 0  # bytes since the folder was last measured
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def look_up(self, keys: Sequence[bytes]) -> None:
        """`has` asks the file system."""

    def stats(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def has(self, key: bytes) -> bool:
        """Whether there is a file of that key."""
        return os.path.exists(self._path(key))

    def write(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Write a file of these contents; False if there is one. Raises `OSError`.

        The file is under its name only after `publish`, which `write_unpublished` leaves to the caller.
        """
        temporary = self.write_unpublished(key, parts)
        return temporary is not None and self.publish(key, temporary)

    def write_unpublished(self, key: bytes, parts: Sequence[Buffer]) -> str | None:
        """As `write`, under a temporary name, which is returned. None: there is a file of the key."""
        path = self._path(key)
        if os.path.exists(path):
            return None
        checksum, size = xxhash.xxh3_64(), 0
        for part in parts:
            checksum.update(part)
            size += len(part)
        header = bytearray(HEADER_BYTES)
        _HEADER.pack_into(header, 0, _MAGIC, self._fingerprint, size, checksum.intdigest(), self._rank, len(key))
        header[_HEADER.size : _HEADER.size + len(key)] = key
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        temporary = f"{path}.{os.getpid()}.{threading.get_ident()}{_TEMPORARY}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(descriptor, [memoryview(header), *parts])
            os.fsync(descriptor)
        except BaseException:
            self.discard(temporary)
            raise
        finally:
            os.close(descriptor)
        return temporary

    def publish(self, key: bytes, temporary: str) -> bool:
        """Give a complete file its name."""
        size = os.path.getsize(temporary)
        os.rename(temporary, self._path(key))
        self._written += size
        if self._written > self._limit * _FREED_SHARE / 2:
            self.make_room()
        return True

    @staticmethod
    def discard(temporary: str) -> None:
        """Remove a file that will not be published."""
        with contextlib.suppress(OSError):
            os.unlink(temporary)

    def read(self, key: bytes, parts: Sequence[Buffer]) -> None:
        """Read the file of the key into writable buffers. Raises `OSError`; `BadFileError` if it is damaged, which also removes it.

        What the buffers hold after an error is undefined.
        """
        path = self._path(key)
        header = self._header()
        size = sum(map(len, parts))
        buffers: list[Buffer | mmap.mmap] = [header, *parts]
        if self._is_direct and all(len(part) % HEADER_BYTES == 0 for part in parts):
            try:
                count = _read(path, buffers, os.O_DIRECT)
            except OSError:
                if not os.path.exists(path):
                    raise
                self._is_direct = False  # the file system has no direct reads
                count = _read(path, buffers)
        else:
            count = _read(path, buffers)
        problem = self._problem(header, key, size, count, parts)
        if problem is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise BadFileError(f"{path} {problem}, so it is not used, and was removed.")
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used files are removed first

    def make_room(self) -> None:
        """Remove the least recently used files of the whole folder until it is below its limit, and what processes that died left."""
        self._written = 0
        found: list[tuple[float, int, str]] = []
        now = time.time()
        for path in files_in(self._root):
            with contextlib.suppress(OSError):  # another engine removes files too
                status = os.stat(path)
                if path.endswith(_TEMPORARY):
                    if now - status.st_mtime > _STALE_SECONDS:
                        os.unlink(path)
                    continue
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self._limit * (1 - _FREED_SHARE / 2):
            return
        for _, size, path in sorted(found):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= self._limit * (1 - _FREED_SHARE):
                return

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}.{self._rank}"

    def _header(self) -> mmap.mmap:
        """A buffer of this thread, at an address that direct reads take."""
        header: mmap.mmap | None = getattr(self._headers, "buffer", None)
        if header is None:
            header = self._headers.buffer = mmap.mmap(-1, HEADER_BYTES)
        return header

    def _problem(self, header: mmap.mmap, key: bytes, size: int, count: int, parts: Sequence[Buffer]) -> str | None:
        if count < HEADER_BYTES + size:
            return "is too short"
        magic, fingerprint, length, checksum, rank, key_bytes = _HEADER.unpack_from(header, 0)
        if magic != _MAGIC or fingerprint != self._fingerprint or rank != self._rank:
            return "is of another format or model"
        if header[_HEADER.size : _HEADER.size + key_bytes] != key or length != size:
            return "has another content than its name says"
        found = xxhash.xxh3_64()
        for part in parts:
            found.update(part)
        return None if found.intdigest() == checksum else "is damaged"


def files_in(root: Path) -> Iterator[str]:
    """All files of contents below a folder, also unfinished ones. Folders may vanish meanwhile."""
    for folder, _, names in os.walk(root):
        yield from (f"{folder}/{name}" for name in names)


def remove_unused(root: Path, seconds: float) -> tuple[int, int]:
    """Remove files that were not used for so long, and what processes that died left. → files, bytes"""
    count = num_bytes = 0
    now = time.time()
    for path in files_in(root):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if now - status.st_mtime > (min(seconds, _STALE_SECONDS) if path.endswith(_TEMPORARY) else seconds):
                os.unlink(path)
                count, num_bytes = count + 1, num_bytes + status.st_size
    return count, num_bytes


def _read(path: str, buffers: Sequence[Buffer | mmap.mmap], flags: int = 0) -> int:
    """Fill the buffers from the file's beginning; → bytes"""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        return os.preadv(descriptor, buffers, 0)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    for part in parts:
        while part:
            part = part[os.write(descriptor, part) :]

"""Transports in which a rank reads another engine's memory itself, without a copy through the host: CUDA IPC and NIXL.

A rank describes its memory when it announces itself. Another rank opens the description once, and then reads pages: it knows from `Granted`
where they lie. Pages move as a whole, so the layouts must be equal; others go through sockets.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import msgspec

from compile_and_serve.runtime.connector.handover.pages import PageBytes

logger = logging.getLogger(__name__)


class CannotReadDirectlyError(Exception):
    """The other rank's memory cannot be opened from here. The message is one sentence."""


class PartAddress(msgspec.Struct, array_like=True, frozen=True):
    """Where the rows of a part of a group lie. memory: number of the registered memory. offset: of row 0 from its beginning, in bytes."""

    memory: int
    offset: int
    stride: int
    row_bytes: int


class Copy(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of a row of another rank, and where they go."""

    memory: int
    offset: int
    to: int
    num_bytes: int


class Reader(ABC):
    """Another rank's memory, opened. parts: of each group."""

    parts: list[list[PartAddress]]

    @abstractmethod
    def read(self, copies: Sequence[Copy]) -> None:
        """Copy, and wait until everything is there. Raises `TransferError`."""

    def close(self) -> None:  # noqa: B027 (some have nothing to close)
        """The memory is not read any more."""


class DirectTransport(ABC):
    """A way to read memory of other ranks. name: of its descriptions in `RankInfo.memory`."""

    name: str

    @abstractmethod
    def describe(self) -> bytes:
        """This rank's memory, for others. Raises `CannotReadDirectlyError`."""

    @abstractmethod
    def open(self, description: bytes) -> Reader:
        """Another rank's memory. Raises `CannotReadDirectlyError`."""

    def close(self) -> None:  # noqa: B027
        """Let go of everything."""


def copies_of(reader: Reader, pages: PageBytes, group: int, theirs: Sequence[int], mine: Sequence[int]) -> list[Copy]:
    """Which bytes go where, for whole pages. Pages that follow each other on both sides are one copy."""
    found: list[Copy] = []
    for their, own in zip(reader.parts[group], pages.parts[group], strict=True):
        stride, base = own.stride(0), own.data_ptr()
        can_join = their.stride == stride == their.row_bytes
        begin = 0
        for number in range(1, len(mine) + 1):
            follows = number < len(mine) and theirs[number] == theirs[number - 1] + 1 and mine[number] == mine[number - 1] + 1
            if can_join and follows:
                continue
            size = their.row_bytes * (number - begin)
            found.append(Copy(their.memory, their.offset + theirs[begin] * their.stride, base + mine[begin] * stride, size))
            begin = number
    return found


class DirectReaders:
    """Memory of other ranks, opened when it is first read. Safe to be called from several threads."""

    def __init__(self, transports: Sequence[DirectTransport]) -> None:
        self._lock = threading.Lock()
        self._readers: dict[tuple[str, bytes], Reader | None] = {}
        self.memory: dict[str, bytes] = {}  # descriptions of this rank's, by transport
        self._transports: list[DirectTransport] = []
        for transport in transports:
            try:
                self.memory[transport.name] = transport.describe()
                self._transports.append(transport)
            except CannotReadDirectlyError as error:
                logger.warning("Other engines cannot read this rank's blocks over %s: %s", transport.name, error)

    def reader_of(self, memory: Mapping[str, bytes]) -> tuple[str, Reader] | None:
        """The way in which another rank's memory can be read; None: through sockets."""
        for transport in self._transports:
            description = memory.get(transport.name)
            if description is None:
                continue
            key = transport.name, description
            with self._lock:
                if key not in self._readers:
                    try:
                        self._readers[key] = transport.open(description)
                    except CannotReadDirectlyError as error:
                        self._readers[key] = None
                        logger.warning("Another engine's blocks do not come over %s: %s", transport.name, error)
                reader = self._readers[key]
            if reader is not None:
                return transport.name, reader
        return None

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                if reader is not None:
                    reader.close()
            self._readers.clear()
        for transport in self._transports:
            transport.close()

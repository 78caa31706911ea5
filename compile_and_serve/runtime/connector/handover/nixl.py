"""NIXL: a rank reads another engine's memory over what the hosts have between them: RDMA, NVLink, shared memory, TCP (UCX).

The package is an extra (`[nixl]`). What it offers is called through `Library`, so that tests can take its place.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import msgspec

from compile_and_serve.runtime.connector.handover.direct import CannotReadDirectlyError, Copy, DirectTransport, PartAddress, Reader
from compile_and_serve.runtime.connector.handover.pages import PageBytes
from compile_and_serve.runtime.connector.handover.wire import TransferError

_POLL_SECONDS = 0.0001
_READ_SECONDS = 30.0


class Library(Protocol):
    """What is used of `nixl._api`."""

    def nixl_agent(self, agent_name: str) -> Any: ...


class _Description(msgspec.Struct):
    """kind: of memory, as NIXL names it. bases: addresses of the parts' first rows."""

    metadata: bytes
    kind: str
    device: int
    bases: list[int]
    parts: list[list[PartAddress]]


def nixl_library() -> Any | None:
    """The package's module; None if it is not installed, or does not load here."""
    try:
        return import_module("nixl._api")
    except (ImportError, OSError):
        return None


class Nixl(DirectTransport):
    """Registers this rank's memory with an agent."""

    name = "nixl"

    def __init__(self, pages: PageBytes, library: Library) -> None:
        self._pages, self._lock = pages, threading.Lock()
        self._kind = "DRAM" if pages.platform.shares_host_memory else "VRAM"
        self._device = max(0, pages.platform.indexed_device.index or 0)
        try:
            self._agent = library.nixl_agent(f"cas-{secrets.token_hex(8)}")
            regions = {(part.data_ptr(), (part.shape[0] - 1) * part.stride(0) + part.shape[1]) for parts in pages.parts for part in parts}
            self._registered = self._agent.register_memory([(*region, self._device, "") for region in sorted(regions)], self._kind)
            self._metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # the library's own kinds
            raise CannotReadDirectlyError(f"NIXL cannot register the KV cache: {error}.") from error

    def describe(self) -> bytes:
        bases: list[int] = []
        parts: list[list[PartAddress]] = []
        for group in self._pages.parts:
            parts.append([])
            for part in group:
                parts[-1].append(PartAddress(len(bases), 0, part.stride(0), part.shape[1]))
                bases.append(part.data_ptr())
        return msgspec.msgpack.encode(_Description(self._metadata, self._kind, self._device, bases, parts))

    def open(self, description: bytes) -> Reader:
        found = msgspec.msgpack.decode(description, type=_Description)
        try:
            with self._lock:
                name = self._agent.add_remote_agent(found.metadata)
        except Exception as error:
            raise CannotReadDirectlyError(f"NIXL cannot reach the other engine: {error}.") from error
        return _NixlReader(self, found, name)

    def read(self, found: _Description, name: Any, copies: Sequence[Copy]) -> None:
        """Of `_NixlReader`."""
        agent = self._agent
        theirs = [(found.bases[one.memory] + one.offset, one.num_bytes, found.device) for one in copies]
        mine = [(one.to, one.num_bytes, self._device) for one in copies]
        try:
            with self._lock:
                handle = agent.initialize_xfer(
                    "READ", agent.get_xfer_descs(mine, self._kind), agent.get_xfer_descs(theirs, found.kind), name, b""
                )
                state = agent.transfer(handle)
            end = time.monotonic() + _READ_SECONDS
            while state == "PROC" and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
                with self._lock:
                    state = agent.check_xfer_state(handle)
            with self._lock:
                agent.release_xfer_handle(handle)
        except Exception as error:
            raise TransferError(f"NIXL could not read from the other engine: {error}.") from error
        if state != "DONE":
            raise TransferError(f"NIXL could not read from the other engine: the transfer ended as {state}.")

    def forget(self, name: Any) -> None:
        """Of `_NixlReader`."""
        with self._lock:
            self._agent.remove_remote_agent(name)

    def close(self) -> None:
        with self._lock:
            self._agent.deregister_memory(self._registered)


class _NixlReader(Reader):
    def __init__(self, transport: Nixl, found: _Description, name: Any) -> None:
        self._transport, self._found, self._name = transport, found, name
        self.parts = found.parts

    def read(self, copies: Sequence[Copy]) -> None:
        self._transport.read(self._found, self._name, copies)

    def close(self) -> None:
        self._transport.forget(self._name)

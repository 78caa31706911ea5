"""CUDA IPC: a rank maps the memory of another process of the same host, and copies pages between devices on a stream of its own.

Through the driver's API: its handles name whole allocations, so that where a cache begins in its allocation must be told, too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from compile_and_serve.runtime.connector.handover.direct import CannotReadDirectlyError, Copy, DirectTransport, PartAddress, Reader
from compile_and_serve.runtime.connector.handover.pages import PageBytes
from compile_and_serve.runtime.connector.handover.wire import TransferError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Description(msgspec.Struct):
    """host: its boot. handles: of allocations."""

    host: bytes
    handles: list[bytes]
    parts: list[list[PartAddress]]


class Driver:
    """The calls of libcuda that are used. Raises `CannotReadDirectlyError` if the library is not there, or a call fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CannotReadDirectlyError(f"CUDA's driver is not there: {error}.") from error

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise CannotReadDirectlyError(f"{name} failed: {(text.value or b'unknown error').decode()}.")

    def allocation_of(self, address: int) -> int:
        """The beginning of the allocation in which the address lies."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value

    def handle_of(self, address: int) -> bytes:
        """The handle of an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        """Undo `open`."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy."""
        self._call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream))


class CudaIpc(DirectTransport):
    """driver: of this machine, unless a test gives another one."""

    name = "cuda_ipc"

    def __init__(self, pages: PageBytes, driver: Driver | None = None) -> None:
        self._pages, self._driver = pages, driver
        self._lock = threading.Lock()
        self._opened: dict[bytes, int] = {}

    def _ready_driver(self) -> Driver:
        self._driver = self._driver or Driver()
        return self._driver

    def describe(self) -> bytes:
        driver = self._ready_driver()
        bases: dict[int, int] = {}
        parts: list[list[PartAddress]] = []
        for group in self._pages.parts:
            addresses = []
            for part in group:
                base = driver.allocation_of(part.data_ptr())
                number = bases.setdefault(base, len(bases))
                addresses.append(PartAddress(number, part.data_ptr() - base, part.stride(0), part.shape[1]))
            parts.append(addresses)
        handles = [driver.handle_of(base) for base in bases]
        return msgspec.msgpack.encode(_Description(_boot(), handles, parts))

    def open(self, description: bytes) -> Reader:
        driver = self._ready_driver()
        found = msgspec.msgpack.decode(description, type=_Description)
        if found.host != _boot():
            raise CannotReadDirectlyError("The other engine runs on another host.")
        platform = self._pages.platform
        platform.make_current()
        platform.record_timed_event().synchronize()  # a thread has no context before its first call of the runtime
        with self._lock:  # an allocation can be mapped only once
            for handle in found.handles:
                if handle not in self._opened:
                    self._opened[handle] = driver.open(handle)
            return _IpcReader(self._pages, driver, found.parts, [self._opened[handle] for handle in found.handles])

    def close(self) -> None:
        with self._lock:
            for address in self._opened.values():
                self._ready_driver().close(address)
            self._opened.clear()


class _IpcReader(Reader):
    def __init__(self, pages: PageBytes, driver: Driver, parts: list[list[PartAddress]], addresses: list[int]) -> None:
        self.parts = parts
        self._pages, self._driver, self._addresses = pages, driver, addresses

    def read(self, copies: Sequence[Copy]) -> None:
        platform, stream = self._pages.platform, self._pages.stream()
        with stream.running() if stream is not None else nullcontext():
            handle = platform.current_stream()
            try:
                for one in copies:
                    self._driver.copy(one.to, self._addresses[one.memory] + one.offset, one.num_bytes, handle)
            except CannotReadDirectlyError as error:
                raise TransferError(str(error)) from error
            finally:
                platform.record_timed_event().synchronize()


def _boot() -> bytes:
    """Of this host, as long as it runs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""

"""`Platform`: what a kind of device can do, and its memory, streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import torch


class MemoryInfo(NamedTuple):
    """Bytes of a device. free: that this process may still take. reserved: that this process holds."""

    free: int
    total: int
    reserved: int


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class TimedEvent(Event, Protocol):
    """An event that knows when the work before it was done."""

    def query(self) -> bool:
        """Whether the work before the event is done."""
        ...

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Time between two events that are done."""
        ...


class SideStream(Protocol):
    """A stream for copies beside the work of the current one."""

    def wait(self) -> None:
        """What is enqueued on it from now on runs after all that was enqueued on the current stream before."""
        ...

    def running(self, *, waits: bool = True) -> AbstractContextManager[None]:
        """What is enqueued inside runs on it. waits: `wait` comes first."""
        ...


class CapturedGraph(Protocol):
    """Captured work. `replay` enqueues it on the current stream."""

    def replay(self) -> None: ...


class Platform(Protocol):
    """One device.

    is_asynchronous: work is queued, and the host does not wait for it. shares_host_memory: the host reads and writes tensors in place.
    replays_graphs: work can be captured and replayed. runs_cpp_kernels, runs_cuda_kernels: csrc/cpu's and csrc/cuda's kernels.
    runs_triton_kernels: Triton compiles for the device (its interpreter does not count). collectives: torch's backend for them.
    """

    device: torch.device
    is_asynchronous: bool
    shares_host_memory: bool
    replays_graphs: bool
    runs_cpp_kernels: bool
    runs_cuda_kernels: bool
    runs_triton_kernels: bool
    collectives: str

    @property
    def name(self) -> str:
        """For messages and reports: "cpu", or the GPU's name."""
        ...

    @property
    def indexed_device(self) -> torch.device:
        """The device with its number, where devices are numbered."""
        ...

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of a CUDA device; (0, 0) elsewhere."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """Programs that run at once are counted in these; 1 on a CPU."""
        ...

    @property
    def shared_bytes_per_multiprocessor(self) -> int:
        """The most shared memory that a multiprocessor can have; 0 on a CPU."""
        ...

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of the device's memory, as the device states it; 0.0: it does not."""
        ...

    @property
    def l2_bytes(self) -> int:
        """Size of the cache that all multiprocessors share; 0 on a CPU, where nothing asks for it."""
        ...

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether the device has arithmetic of its own for bfloat16 and float8_e4m3fn; True for other dtypes."""
        ...

    def memory(self) -> MemoryInfo: ...

    def used_bytes(self) -> int:
        """What this process's tensors take; on a CPU all of the process."""
        ...

    def peak_bytes(self) -> int:
        """The most that `used_bytes` has been since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def release_cached(self) -> None:
        """Return memory that freed tensors took to the system."""
        ...

    def host_zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [length] on the host, page-locked where copies to the device do not wait."""
        ...

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """The memory of `host_zeros` as a tensor that the device's kernels read and write in place, not through the copy engines. Where
        memory is shared, the tensor itself. Raises `RuntimeError`.
        """
        ...

    def host_pages(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """uint8 [pages, bytes] of the host, at an address for direct reads of files; page-locked where copies to the device do not wait."""
        ...

    def side_stream(self) -> SideStream | None:
        """A stream for copies. None where work is done at once."""
        ...

    def upload(self, array: np.ndarray, *, through_pinned: bool = False) -> torch.Tensor:
        """The array on the device, in stream order, without waiting. Where memory is shared, the tensor is the array itself.

        through_pinned: through a page-locked copy, so that a large array does not wait either.
        """
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the host, complete once the device has done the work up to here. Where memory is shared, the tensor itself."""
        ...

    def make_current(self) -> None:
        """Use this device on the calling thread."""
        ...

    def synchronize(self) -> None:
        """Wait for all of the device's work."""
        ...

    def current_stream(self) -> int:
        """Handle of the current stream, for kernels launched from C; 0 where there are no streams."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream's work is being captured."""
        ...

    def record_event(self) -> Event | None:
        """Mark this point in the current stream. None where work is done at once."""
        ...

    def record_timed_event(self) -> TimedEvent:
        """As `record_event`, with a time."""
        ...

    def capture(self, work: Callable[[], object], warm_up: int = 1) -> CapturedGraph:
        """`work` as a graph. It runs `warm_up` times before. Only where `replays_graphs`.

        Without a warm-up, buffers that a library makes at its first call on a stream would belong to the graph.
        """
        ...

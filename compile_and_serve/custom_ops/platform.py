"""Platforms: what a kind of device can do, and its memory, streams, events and graphs.

`platform_of(device)` answers; nothing else compares a device's type or calls `torch.cuda` (tests/custom_ops/test_platform.py). A hot path
reads an attribute once, in its constructor.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from compile_and_serve.custom_ops.compat import current_raw_stream
from compile_and_serve.custom_ops.device_names import BUILT_IN_DEVICES
from compile_and_serve.plugins import load_plugins

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last on WSL
_CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, Arm


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

    def running(self) -> AbstractContextManager[None]:
        """What is enqueued inside runs on it, after all that was enqueued on the current stream before."""
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


class _WallClockEvent:
    """The host's time, on a device whose work is done at once."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, _WallClockEvent)
        return self._at - earlier._at


class CpuPlatform:
    """The host's processor. Work is done when a call returns."""

    is_asynchronous = False
    shares_host_memory = True
    replays_graphs = False
    runs_cpp_kernels = True
    runs_cuda_kernels = False
    runs_triton_kernels = False
    collectives = "gloo"
    compute_capability = (0, 0)
    num_multiprocessors = 1
    shared_bytes_per_multiprocessor = 0
    l2_bytes = 0
    memory_bandwidth = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = self.indexed_device = device
        self.name = device.type

    def computes_in(self, dtype: torch.dtype) -> bool:
        """See `Platform.computes_in`."""
        if dtype == torch.bfloat16:
            return bool(_CPU_BF16_FLAGS & _cpu_flags())
        return dtype != torch.float8_e4m3fn

    def memory(self) -> MemoryInfo:
        """free: what the system has available, within the control group's limit."""
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
        meminfo = Path("/proc/meminfo")
        if meminfo.exists() and (available := re.search(r"^MemAvailable:\s*(\d+)", meminfo.read_text(), re.MULTILINE)):
            free = int(available[1]) * 1024
        limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            total, free = min(total, int(text)), min(free, max(0, int(text) - int(used.read_text())))
        return MemoryInfo(free=free, total=total, reserved=self.used_bytes())

    def used_bytes(self) -> int:
        """Resident memory of this process."""
        return _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """The most resident memory of this process since `reset_peak`."""
        return _status_bytes("VmHWM")

    def reset_peak(self) -> None:
        """See `Platform.reset_peak`."""
        Path("/proc/self/clear_refs").write_text("5")

    def release_cached(self) -> None:
        """Return what the allocator of glibc keeps in its heap, where large tensors lie too once the heap has room for them."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def host_zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Platform.host_zeros`."""
        return torch.zeros(length, dtype=dtype)

    def host_pages(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """See `Platform.host_pages`. Memory is only taken as it is used."""
        return torch.frombuffer(mmap.mmap(-1, num_pages * page_bytes), dtype=torch.uint8).view(num_pages, page_bytes)

    def side_stream(self) -> SideStream | None:
        """Work is done at once."""
        return None

    def upload(self, array: np.ndarray, *, through_pinned: bool = False) -> torch.Tensor:
        """See `Platform.upload`."""
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Platform.download`."""
        return tensor

    def make_current(self) -> None:
        """There is one CPU."""

    def synchronize(self) -> None:
        """Work is done already."""

    def current_stream(self) -> int:
        """See `Platform.current_stream`."""
        return 0

    def is_capturing(self) -> bool:
        """See `Platform.is_capturing`."""
        return False

    def record_event(self) -> Event | None:
        """See `Platform.record_event`."""
        return None

    def record_timed_event(self) -> TimedEvent:
        """See `Platform.record_timed_event`."""
        return _WallClockEvent()

    def capture(self, work: Callable[[], object], warm_up: int = 1) -> CapturedGraph:
        """Raises `ValueError`."""
        raise ValueError(f"{self.name} has no graphs to capture work in.")


class _CudaTimedEvent:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return self._event.query()

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, _CudaTimedEvent)
        return earlier._event.elapsed_time(self._event) / 1e3


class _CudaSideStream:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `SideStream`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


class CudaPlatform:
    """One CUDA device; without a number, the current one. Construction does not initialize CUDA."""

    is_asynchronous = True
    shares_host_memory = False
    replays_graphs = True
    runs_cpp_kernels = False
    runs_cuda_kernels = True
    runs_triton_kernels = True
    collectives = "nccl"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """See `Platform.name`."""
        return torch.cuda.get_device_name(self.device)

    @property
    def indexed_device(self) -> torch.device:
        """See `Platform.indexed_device`."""
        return self.device if self.device.index is not None else torch.device("cuda", torch.cuda.current_device())

    @property
    def compute_capability(self) -> tuple[int, int]:
        """See `Platform.compute_capability`."""
        return torch.cuda.get_device_capability(self.device)

    @property
    def num_multiprocessors(self) -> int:
        """See `Platform.num_multiprocessors`."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def shared_bytes_per_multiprocessor(self) -> int:
        """See `Platform.shared_bytes_per_multiprocessor`."""
        return torch.cuda.get_device_properties(self.device).shared_memory_per_multiprocessor

    @property
    def memory_bandwidth(self) -> float:
        """See `Platform.memory_bandwidth`."""
        found = torch.cuda.get_device_properties(self.device)
        kilohertz, bits = (getattr(found, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # since torch 2.7
        return 2e3 * kilohertz * bits / 8  # two transfers a cycle

    @property
    def l2_bytes(self) -> int:
        """See `Platform.l2_bytes`."""
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def computes_in(self, dtype: torch.dtype) -> bool:
        """See `Platform.computes_in`."""
        needed = {torch.bfloat16: (8, 0), torch.float8_e4m3fn: (8, 9)}.get(dtype)
        return needed is None or self.compute_capability >= needed

    def memory(self) -> MemoryInfo:
        """See `Platform.memory`."""
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryInfo(free=free, total=total, reserved=torch.cuda.memory_reserved(self.device))

    def used_bytes(self) -> int:
        """See `Platform.used_bytes`."""
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """See `Platform.peak_bytes`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """See `Platform.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        """See `Platform.release_cached`."""
        torch.cuda.empty_cache()

    def host_zeros(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Platform.host_zeros`."""
        return torch.zeros(length, dtype=dtype, pin_memory=True)

    def host_pages(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        """See `Platform.host_pages`. Not by torch's allocator: it takes the next power of two. Raises `RuntimeError`."""
        memory = mmap.mmap(-1, num_pages * page_bytes)
        pages = torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, page_bytes)
        runtime, address = torch.cuda.cudart(), pages.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, pages.numel(), 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return pages

    def side_stream(self) -> SideStream | None:
        """See `Platform.side_stream`."""
        return _CudaSideStream()

    def upload(self, array: np.ndarray, *, through_pinned: bool = False) -> torch.Tensor:
        """See `Platform.upload`."""
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if through_pinned else tensor).to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Platform.download`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host

    def make_current(self) -> None:
        """See `Platform.make_current`."""
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """See `Platform.synchronize`."""
        torch.cuda.synchronize(self.device)

    def current_stream(self) -> int:
        """See `Platform.current_stream`."""
        index = self.device.index
        return current_raw_stream(torch.cuda.current_device() if index is None else index)

    def is_capturing(self) -> bool:
        """See `Platform.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def record_event(self) -> Event | None:
        """See `Platform.record_event`."""
        event = torch.cuda.Event()
        event.record()
        return event

    def record_timed_event(self) -> TimedEvent:
        """See `Platform.record_timed_event`."""
        return _CudaTimedEvent()

    def capture(self, work: Callable[[], object], warm_up: int = 1) -> CapturedGraph:
        """See `Platform.capture`. The graph belongs to a stream of its own."""
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                work()
            torch.cuda.synchronize()
            gc.disable()  # freeing a tensor of another stream may break a capture
            try:
                graph.capture_begin(capture_error_mode="thread_local")  # other threads may use the device meanwhile
                try:
                    work()
                finally:
                    graph.capture_end()
            finally:
                if was_enabled:
                    gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


@functools.cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


# A registry: platforms belong to devices, not to engines.
_makers: dict[str, Callable[[torch.device], Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}


@functools.cache
def platform_of(device: torch.device) -> Platform:
    """The device's platform: one instance for each device. Raises `ValueError` for a type of device that is not registered."""
    load_plugins("platforms")
    make = _makers.get(device.type)
    if make is None:
        raise ValueError(f"There is no platform for {device.type} devices: known are {', '.join(_makers)}.")
    return make(device)


def register_platform(device_type: str, make: Callable[[torch.device], Platform] | None) -> None:
    """`make` makes the platforms of this type of torch device from now on; None removes the type."""
    if make is None:
        _makers.pop(device_type, None)
    else:
        _makers[device_type] = make
    platform_of.cache_clear()


def resolve_device(name: str, index: int | None = None) -> torch.device:
    """The torch device; "auto" is CUDA if available. index: of the device, which becomes the current one.

    name: "auto", "cpu", "cuda", or the type of device of a plug-in's platform. Raises `ValueError` for another name, and if CUDA is
    wanted and not available, or has no such device.
    """
    if name not in BUILT_IN_DEVICES:
        load_plugins("platforms")  # which also make the type known to torch
        device = torch.device(name) if index is None else torch.device(name, index)
        platform_of(device).make_current()
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", str(index))
    is_hidden = visible.strip() in ("", "-1")  # on purpose
    if name != "cpu" and index is not None and not is_hidden and not torch.cuda.is_available() and _has_cuda():
        raise ValueError(
            f"CUDA device {visible} is wanted, but torch finds no such device here: ranks and replicas have a device each; lower "
            "--tensor-parallel-size or --data-parallel-size, check the driver, or use --device cpu."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device here: use --device cpu, or check the driver.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if index is not None:
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"CUDA device {index} is wanted, but this machine has {torch.cuda.device_count()}: ranks and replicas have a "
                "device each; lower --tensor-parallel-size or --data-parallel-size."
            )
        torch.cuda.set_device(index)
    return torch.device("cuda", torch.cuda.current_device())


def _has_cuda() -> bool:
    """Whether torch and this machine are made for CUDA, whatever devices this process sees."""
    return torch.version.cuda is not None and any(Path(file).exists() for file in _DRIVER_FILES)


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines: Sequence[str] = cpuinfo.read_text().splitlines() if cpuinfo.exists() else ()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(flags.partition(":")[2].split())


def _status_bytes(field: str) -> int:
    """A size in /proc/self/status; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    found = re.search(rf"^{field}:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return 0 if found is None else int(found[1]) * 1024

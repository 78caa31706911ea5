"""CUDA devices as platforms. Only this file and the capture of graphs call `torch.cuda`."""

from __future__ import annotations

import functools
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from compile_and_serve.custom_ops.compat import current_raw_stream
from compile_and_serve.custom_ops.platforms.protocol import CapturedGraph, Event, MemoryInfo, SideStream, TimedEvent


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

    def wait(self) -> None:
        """See `SideStream`."""
        self._stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def running(self, *, waits: bool = True) -> Iterator[None]:
        """See `SideStream`."""
        if waits:
            self.wait()
        with torch.cuda.stream(self._stream):
            yield


class _HostArray:
    """Page-locked memory of the host, for `torch.as_tensor`: its address is the device's too."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # which lives as long
        data, kind = (host.data_ptr(), False), host.numpy().dtype.str
        self.__cuda_array_interface__ = {"shape": tuple(host.shape), "typestr": kind, "data": data, "strides": None, "version": 3}


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

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """See `Platform.device_view`."""
        view = torch.as_tensor(_HostArray(host), device=self.indexed_device)
        if view.data_ptr() != host.data_ptr():
            raise RuntimeError("the device has another address for the host's memory")
        return view

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

"""The host's processor as a platform."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from compile_and_serve.custom_ops.platforms.protocol import CapturedGraph, Event, MemoryInfo, SideStream, TimedEvent

_CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, Arm


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

    def device_view(self, host: torch.Tensor) -> torch.Tensor:
        """See `Platform.device_view`."""
        return host

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

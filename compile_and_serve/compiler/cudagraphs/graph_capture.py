"""Capturing work as a CUDA graph, behind a protocol that tests fake."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from compile_and_serve.custom_ops.platform import platform_of

# Under load a capture takes about as long as 16 steps, so it waits until going without the graph has cost as much.
CAPTURE_STEPS = 16
PLAIN_STEP_LOSS = 4  # steps lost by one that the host launches kernel by kernel


class Graph(Protocol):
    """Captured work. `replay` enqueues it on the current stream."""

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    """Where graphs are captured."""

    bytes_per_graph: int  # what a graph of a model's step takes besides its tensors

    def capture(
        self, fn: Callable[[], Sequence[torch.Tensor]], *, keep_outputs: bool = False
    ) -> tuple[Graph, tuple[torch.Tensor, ...], float]:
        """Run fn once, then capture it; → graph, its outputs, seconds.

        All graphs of a device share one memory pool. The outputs hold what the last replay computed until any graph of
        the device is replayed next, or with keep_outputs until the graph itself is.
        """
        ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without keeping it from later captures."""
        ...

    def used_bytes(self) -> int:
        """Device memory in use, that of graphs themselves included."""
        ...

    def peak_bytes(self, fn: Callable[[], None]) -> int:
        """What fn's temporaries take at most."""
        ...


class GraphCaptureError(RuntimeError):
    """Work could not be captured as a CUDA graph."""


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """What fails inside says that it was the capture of a graph of `what`, and how to do without: as `GraphCaptureError`, or as
    `torch.OutOfMemoryError` where it is one.
    """
    try:
        yield
    except Exception as error:
        kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else GraphCaptureError
        raise kind(
            f"The CUDA graph of {what} could not be captured: {type(error).__name__}: {error} (--cudagraph-mode none does without graphs, "
            "a lower --gpu-memory-utilization leaves them more memory.)"
        ) from error


class CudaGraphs:
    """`GraphDevice` of one CUDA device: one memory pool, one capture stream."""

    bytes_per_graph = 4 << 20

    def __init__(self, device: torch.device) -> None:
        self._device, self._platform = device, platform_of(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._collected = False

    def capture(
        self, fn: Callable[[], Sequence[torch.Tensor]], *, keep_outputs: bool = False
    ) -> tuple[Graph, tuple[torch.Tensor, ...], float]:
        """See `GraphDevice.capture`."""
        started = time.perf_counter()
        if not self._collected:
            gc.collect()  # once: collecting during a capture would break it, and collecting before each is slow
            self._collected = True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                fn()
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                # "thread_local": other threads (a background build, say) may go on using the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = tuple(fn())
                except BaseException:
                    with suppress(Exception):  # what it says is but what follows
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if not keep_outputs:
            outputs = tuple(borrowed(output) for output in outputs)
        return graph, outputs, time.perf_counter() - started

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `GraphDevice.borrow`."""
        return borrowed(tensor)

    def used_bytes(self) -> int:
        """See `GraphDevice.used_bytes`."""
        # What the driver keeps of a graph no allocator of ours knows.
        memory = self._platform.memory()
        return memory.total - memory.free

    def peak_bytes(self, fn: Callable[[], None]) -> int:
        """See `GraphDevice.peak_bytes`."""
        platform = self._platform
        fn()
        platform.synchronize()
        before = platform.used_bytes()
        platform.reset_peak()
        fn()
        platform.synchronize()
        return platform.peak_bytes() - before


class _Memory:
    """Device memory that somebody else owns, as torch takes it in."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without owning it: once the tensor itself is gone, later captures of the pool may use the memory too."""
    if tensor.numel() == 0:
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.as_tensor(_Memory(tensor.data_ptr(), (last + 1) * tensor.element_size()), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

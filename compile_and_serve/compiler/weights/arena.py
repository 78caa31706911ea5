"""A single allocation for all weights of a model."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Mapping

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.weight_functions import TensorSpec

log = logging.getLogger(__name__)

ALIGNMENT = 256  # bytes; a multiple of cache lines and of the alignment that generated kernels assume
_MADV_HUGEPAGE = 14  # <sys/mman.h>
_PAGE = 4096


class WeightArena:
    """Uninitialized tensors with given specs, side by side in one allocation on a device.

    On Linux, CPU memory is requested in huge pages: a decode step reads every weight once, so with pages of 4 KiB every page
    would be a TLB miss.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        self._offsets: dict[str, int] = {}
        total = 0
        for name, spec in specs.items():
            self._offsets[name] = total
            size = math.prod(spec.shape) * spec.dtype.itemsize
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._specs = dict(specs)
        self._bytes = torch.empty(total + ALIGNMENT, dtype=torch.uint8, device=device)
        self._base = -self._bytes.data_ptr() % ALIGNMENT
        if platform_of(device).shares_host_memory:
            advise_huge_pages(self._bytes)

    @property
    def memory(self) -> torch.Tensor:
        """The whole allocation, uint8."""
        return self._bytes

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor with this name: a view of the arena, always of the same memory."""
        spec, start = self._specs[name], self._base + self._offsets[name]
        size = math.prod(spec.shape) * spec.dtype.itemsize
        return self._bytes[start : start + size].view(spec.dtype).view(spec.shape)


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Request huge pages for a CPU tensor to which nothing has been written. Does nothing except on Linux."""
    first = -(-memory.data_ptr() // _PAGE) * _PAGE
    length = memory.data_ptr() + memory.numel() * memory.element_size() - first
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None or length <= 0:
        return
    if madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE) != 0:
        log.info("Huge pages are not available (errno %d); reading the weights is slower.", ctypes.get_errno())

"""How large the KV cache is, and its memory.

Shape legend: N cache blocks, K key/value heads, P tokens a block, E head size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from compile_and_serve.compiler.weights.arena import advise_huge_pages
from compile_and_serve.models.spec import KVCacheSpec
from compile_and_serve.runtime.config import CacheConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_DEFAULT_LIMIT = 4 * GIB
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class KVCacheTooSmallError(ValueError):
    """The cache cannot hold one request of the longest allowed length."""


def bytes_per_block(specs: Sequence[KVCacheSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers: keys and values of `block_size` tokens."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * block_size * dtype.itemsize


def plan_num_blocks(
    config: CacheConfig,
    specs: Sequence[KVCacheSpec],
    *,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    free_bytes: int,
    is_cpu: bool,
) -> int:
    """Number of blocks N: the forced number, else what fits the forced bytes, else from `free_bytes`.

    free_bytes: on CUDA what the cache may take (`MemoryPlan.free_for_cache`); on the CPU the
    memory that is free, of which the default takes at most 4 GiB or a quarter (up to a half, where one request would
    not fit otherwise). Never more than max_num_seqs sequences of max_model_len can use. Raises `KVCacheTooSmallError`
    when not even one fits.
    """
    block_bytes = bytes_per_block(specs, config.block_size, dtype)
    blocks_per_request = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.memory_bytes is not None:
        num_blocks = config.memory_bytes // block_bytes
    else:
        if is_cpu:
            one_request = blocks_per_request * block_bytes
            limit = min(CPU_DEFAULT_LIMIT, free_bytes // 4)
            free_bytes = max(limit, min(one_request, free_bytes // 2))
        num_blocks = min(free_bytes // block_bytes, blocks_per_request * max_num_seqs)
    if num_blocks < blocks_per_request:
        advice = "lower --max-model-len or raise --kv-cache-memory"
        if not is_cpu and config.num_blocks is None and config.memory_bytes is None:
            advice = (
                "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs, or raise --gpu-memory-utilization"
            )
        held = max(num_blocks, 0) * config.block_size
        raise KVCacheTooSmallError(
            f"The KV cache has room for {held} tokens ({max(num_blocks, 0)} blocks of {config.block_size}, "
            f"{max(num_blocks, 0) * block_bytes / GIB:.2f} GiB), but one request of max_model_len={max_model_len} needs "
            f"{blocks_per_request * block_bytes / GIB:.2f} GiB: {advice}."
        )
    return num_blocks


def allocate_kv_cache(
    specs: Sequence[KVCacheSpec], num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Zeroed caches [N, 2, K, P, E], one a layer, as views of one allocation. On the CPU pages are only taken as they
    are used.
    """
    sizes = [num_blocks * 2 * spec.num_kv_heads * block_size * spec.head_dim for spec in specs]
    storage = _zeros(sum(sizes), dtype, device)
    if device.type == "cpu":
        advise_huge_pages(storage)  # a sequence's blocks lie anywhere in the cache
    caches, begin = [], 0
    for spec, size in zip(specs, sizes, strict=True):
        shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
        caches.append(storage[begin : begin + size].view(shape))
        begin += size
    return caches


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    # numpy's zeros come from calloc: memory that no request has touched yet is not resident. torch.zeros writes all of it.
    raw = np.zeros(numel * dtype.itemsize + _ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[skip : skip + numel * dtype.itemsize]).view(dtype)


def free_cpu_bytes() -> int:
    """Memory that this process may still take: what the system has available, within the control group's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available

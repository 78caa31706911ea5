"""The memory of a model's state: how many pages there are, how large a page is, and where each layer's tensors lie.

Shape legend: N pages, P tokens per page, R batch slots, K key/value heads, E head size.

All groups whose pages hold tokens share one pool of N pages of equal bytes. A page belongs to one group at a time; a group whose layers
take fewer bytes per token has more tokens per page. Where there is one group only, each layer's tensor is contiguous; where there are
several, a page's bytes are, and a layer's tensor is a strided view.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.compiler.weights.arena import advise_huge_pages
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import GroupLayout
from compile_and_serve.runtime.config import CacheConfig

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_DEFAULT_LIMIT = 4 * GIB
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class KVCacheTooSmallError(ValueError):
    """The cache cannot hold one request of the longest allowed length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """groups: the layout of each group's pages by name. page_bytes: of one page, whichever group has it. slot_bytes: of one batch slot."""

    groups: Mapping[str, GroupLayout]
    page_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, groups: Sequence[StateGroup], block_size: int, dtype: torch.dtype) -> PageLayout:
        """block_size: tokens per page of the group with the most bytes per token. dtype: of the KV cache."""
        page_bytes = max((group.layout(block_size, dtype).page_bytes for group in groups), default=0)
        layouts = {group.name: group.layout_in(page_bytes, block_size, dtype) for group in groups}
        slots = sum(tensor.num_bytes for one in layouts.values() if not one.tokens_per_page for tensor in one.tensors.values())
        return cls(groups=layouts, page_bytes=page_bytes, slot_bytes=slots)

    @property
    def tokens_per_page(self) -> dict[str, int]:
        """By name, of the groups whose pages hold tokens."""
        return {name: one.tokens_per_page for name, one in self.groups.items() if one.tokens_per_page}

    def pages_per_request(self, groups: Sequence[StateGroup], max_model_len: int, max_step_tokens: int) -> int:
        """Pages that one request of the longest length holds at a time."""
        return sum(group.kind.pages_of_request(self.groups[group.name], max_model_len, max_step_tokens) for group in groups)


def plan_num_pages(
    config: CacheConfig,
    groups: Sequence[StateGroup],
    layout: PageLayout,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
    free_bytes: int,
    shares_host_memory: bool,
) -> int:
    """Number of pages N: the forced number, else what fits the forced bytes, else from `free_bytes`.

    shares_host_memory: of the platform; if it does, free_bytes is the memory that is free, of which the default takes at most 4 GiB or a
    quarter (up to a half, where one request would not fit otherwise). If not, free_bytes is what the cache may take
    (`MemoryPlan.free_for_cache`). Never more than max_num_seqs sequences of max_model_len can use.
    Raises `KVCacheTooSmallError` when not even one fits.
    """
    per_request = layout.pages_per_request(groups, max_model_len, max_step_tokens)
    free_bytes -= layout.slot_bytes * (max_num_seqs + 1)
    if not layout.page_bytes:  # no state of tokens: blocks only count tokens
        return config.num_blocks or -(-max_model_len // config.block_size) * max_num_seqs
    if config.num_blocks is not None:
        num_pages = config.num_blocks
    elif config.memory_bytes is not None:
        num_pages = (config.memory_bytes - layout.slot_bytes * (max_num_seqs + 1)) // layout.page_bytes
    else:
        if shares_host_memory:
            one_request = per_request * layout.page_bytes
            limit = min(CPU_DEFAULT_LIMIT, free_bytes // 4)
            free_bytes = max(limit, min(one_request, free_bytes // 2))
        num_pages = min(free_bytes // layout.page_bytes, per_request * max_num_seqs)
    if num_pages < per_request:
        advice = "lower --max-model-len or raise --kv-cache-memory"
        if not shares_host_memory and config.num_blocks is None and config.memory_bytes is None:
            advice = "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs, or raise --gpu-memory-utilization"
        pages = max(num_pages, 0)
        held = pages * max_model_len // per_request if len(layout.tokens_per_page) > 1 else pages * config.block_size
        raise KVCacheTooSmallError(
            f"The KV cache has room for {held} tokens ({pages} blocks of {config.block_size}, "
            f"{pages * layout.page_bytes / GIB:.2f} GiB), but one request of max_model_len={max_model_len} needs "
            f"{per_request * layout.page_bytes / GIB:.2f} GiB: {advice}."
        )
    return num_pages


def allocate_state(
    groups: Sequence[StateGroup], layout: PageLayout, num_pages: int, num_slots: int, *, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Zeroed state tensors by name: [N, …], views of one allocation; of recurrent groups [num_slots + 1, …].

    dtype: of the KV cache. On the CPU memory is only taken as it is used.
    """
    pool = _zeros(num_pages * layout.page_bytes, device)
    if platform_of(device).shares_host_memory and pool.numel():
        advise_huge_pages(pool)  # a sequence's pages lie anywhere in the pool
    tensors: dict[str, torch.Tensor] = {}
    is_only_group = len(layout.tokens_per_page) == 1
    for group in groups:
        placed = layout.groups[group.name]
        for name, one in placed.tensors.items():
            if not placed.tokens_per_page:
                tensors[name] = torch.zeros((num_slots + 1, *one.shape), dtype=one.dtype, device=device)
                continue
            stride, begin = (one.num_bytes, one.offset * num_pages) if is_only_group else (layout.page_bytes, one.offset)
            strides = stride // one.dtype.itemsize, *_contiguous_strides(one.shape)
            tensors[name] = pool.view(one.dtype).as_strided((num_pages, *one.shape), strides, begin // one.dtype.itemsize)
    return tensors


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes]."""
    if not platform_of(device).shares_host_memory:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # numpy's zeros come from calloc: memory that no request has touched yet is not resident. torch.zeros writes all of it.
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[skip : skip + num_bytes])

"""The memory of a model's state: how many pages there are, how large a page is, and where each layer's tensors lie.

Shape legend: N pages.

All groups share one pool of N pages of equal bytes. A page belongs to one group at a time; a group whose layers take fewer bytes per token
has more tokens per page, and a slot of recurrent state is a list of pages. A page's bytes are contiguous over the layers of its group, so
that one copy moves it, and a layer's tensor is a strided view. Where kernels run on the host's memory and there is one group of tokens
only, each layer's tensor is contiguous instead: a layer then reads fewer pages of virtual memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from compile_and_serve.compiler.weights.arena import advise_huge_pages
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import GroupLayout
from compile_and_serve.custom_ops.state.recurrent import ALIGNMENT
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec, LatentCacheSpec
from compile_and_serve.runtime.config import CacheConfig
from compile_and_serve.runtime.connector.page_memory import PagePiece

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_DEFAULT_LIMIT = 4 * GIB
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class KVCacheTooSmallError(ValueError):
    """The cache cannot hold one request of the longest allowed length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLayout:
    """groups: the layout of each group's pages by name. page_bytes: of one page, whichever group has it."""

    groups: Mapping[str, GroupLayout]
    page_bytes: int

    @classmethod
    def of(cls, groups: Sequence[StateGroup], block_size: int, dtype: torch.dtype) -> PageLayout:
        """block_size: tokens per page of the group with the most bytes per token. dtype: of the KV cache.

        A page has room for a block of each group, and for a unit of each recurrent tensor.
        """
        needed = [group.layout(block_size, dtype) for group in groups]
        page_bytes = max((one.page_bytes for one in needed), default=0)
        if any(one.pages_per_slot for one in needed):
            page_bytes = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        whole = cls(groups={group.name: group.layout_in(page_bytes, block_size, dtype) for group in groups}, page_bytes=page_bytes)
        return whole if all(group.held is None for group in groups) else whole._of_stage(groups, dtype)

    def _of_stage(self, groups: Sequence[StateGroup], dtype: torch.dtype) -> PageLayout:
        """The layout of a stage, which holds some of the layers: of the same tokens per page and pages per slot, in fewer bytes."""
        is_slot = {group.name: group.kind.unit == "slot" for group in groups}
        needed = {group.name: group.held_layout(self.groups[group.name], dtype) for group in groups}
        page_bytes = max(one.page_bytes for one in needed.values())
        if not any(is_slot.values()):
            return PageLayout(groups=needed, page_bytes=page_bytes)
        # Smaller pages may need more of them for a slot, but all stages have as many.
        least = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        step = max(ALIGNMENT, (self.page_bytes - least) // 16 // ALIGNMENT * ALIGNMENT)
        for size in (*range(least, self.page_bytes, step), self.page_bytes):
            placed = {
                group.name: group.held_layout(self.groups[group.name], dtype, size) if is_slot[group.name] else needed[group.name]
                for group in groups
            }
            if all(placed[name].pages_per_slot <= self.groups[name].pages_per_slot for name in placed):
                break
        else:
            raise AssertionError("some of the layers need more pages for a slot than all")
        slots = {name: replace(one, pages_per_slot=self.groups[name].pages_per_slot) for name, one in placed.items() if is_slot[name]}
        return PageLayout(groups={**placed, **slots}, page_bytes=size)

    @property
    def tokens_per_page(self) -> dict[str, int]:
        """By name, of the groups whose pages hold tokens."""
        return {name: one.tokens_per_page for name, one in self.groups.items() if one.tokens_per_page}

    @property
    def pages_per_slot(self) -> dict[str, int]:
        """By name, of the groups of slots."""
        return {name: one.pages_per_slot for name, one in self.groups.items() if one.pages_per_slot}

    def columns_of_items(self, groups: Sequence[StateGroup]) -> dict[str, int]:
        """By name, the block-table columns of the groups that keep items of requests."""
        return {group.name: group.kind.pages_of_request(self.groups[group.name], 0, 0) for group in groups if group.kind.unit == "items"}

    @property
    def num_padding_pages(self) -> int:
        """Pages behind the pool's, which padding reads and writes."""
        return 1 if self.pages_per_slot else 0

    def pages_per_request(self, groups: Sequence[StateGroup], max_model_len: int, max_step_tokens: int) -> int:
        """Pages that one request of the longest length holds at a time."""
        return sum(group.kind.pages_of_request(self.groups[group.name], max_model_len, max_step_tokens) for group in groups)


def log_grown_pages(groups: Sequence[StateGroup], block_size: int, dtype: torch.dtype) -> None:
    """Say so where a unit of recurrent state makes pages larger than blocks of `block_size` tokens. dtype: of the KV cache."""
    needed = {group.name: group.layout(block_size, dtype) for group in groups}
    block_bytes = max((one.page_bytes for one in needed.values() if one.tokens_per_page), default=0)
    name = max(needed, key=lambda name: needed[name].page_bytes, default="")
    if block_bytes and needed[name].page_bytes > block_bytes:
        logger.info(
            "A page of the cache has %d bytes instead of the %d of %d tokens: it holds a unit of %s.",
            needed[name].page_bytes,
            block_bytes,
            block_size,
            name,
        )


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
    (`MemoryPlan.free_for_cache`). Never more than max_num_seqs sequences of max_model_len can use. A model without state has none.
    Raises `KVCacheTooSmallError` when not even one fits.
    """
    if not groups:
        return 0
    per_request = layout.pages_per_request(groups, max_model_len, max_step_tokens)
    padding_bytes = layout.num_padding_pages * layout.page_bytes
    free_bytes -= padding_bytes
    if config.num_blocks is not None:
        num_pages = config.num_blocks
    elif config.memory_bytes is not None:
        num_pages = (config.memory_bytes - padding_bytes) // layout.page_bytes
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
        held = pages * max_model_len // per_request if len(layout.groups) > 1 else pages * config.tokens_per_block
        raise KVCacheTooSmallError(
            f"The KV cache has room for {held} tokens ({pages} blocks of {config.tokens_per_block}, "
            f"{pages * layout.page_bytes / GIB:.2f} GiB), but one request of max_model_len={max_model_len} needs "
            f"{per_request * layout.page_bytes / GIB:.2f} GiB: {advice}."
        )
    return num_pages


def allocate_state(groups: Sequence[StateGroup], layout: PageLayout, num_pages: int, *, device: torch.device) -> dict[str, torch.Tensor]:
    """Zeroed state tensors [N, …] by name, views of one allocation; of slots with a page of padding behind the N, and their columns.

    On the CPU memory is only taken as it is used.
    """
    num_all = num_pages + layout.num_padding_pages
    pool = _zeros(num_all * layout.page_bytes, device)
    shares_host_memory = platform_of(device).shares_host_memory
    if shares_host_memory and pool.numel():
        advise_huge_pages(pool)  # a sequence's pages lie anywhere in the pool
    tensors: dict[str, torch.Tensor] = {}
    is_layer_major = _is_layer_major(groups, layout, device)
    for group in groups:
        placed = layout.groups[group.name]
        for name, one in placed.tensors.items():
            stride, begin = (one.num_bytes, one.offset * num_pages) if is_layer_major else (layout.page_bytes, one.offset)
            strides = stride // one.dtype.itemsize, *_contiguous_strides(one.shape)
            tensors[name] = pool.view(one.dtype).as_strided((num_all, *one.shape), strides, begin // one.dtype.itemsize)
        tensors |= placed.column_tensors(device)
    return tensors


def _is_layer_major(groups: Sequence[StateGroup], layout: PageLayout, device: torch.device) -> bool:
    """Whether each layer's tensor is contiguous, and not each page."""
    return platform_of(device).shares_host_memory and len(groups) == 1 and not layout.num_padding_pages


def page_parts(groups: Sequence[StateGroup], layout: PageLayout, state: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """`PageMemory.parts` of `allocate_state`'s tensors: one by one where each is contiguous, else all bytes of a page at once."""
    pages: list[list[torch.Tensor]] = []
    for group in groups:
        names = list(layout.groups[group.name].tensors)
        if not names:  # other stages hold its layers
            pages.append([])
            continue
        name = names[0]
        if _is_layer_major(groups, layout, state[name].device):
            pages.append([state[name] for name in names])
            continue
        pool = torch.empty(0, dtype=torch.uint8, device=state[name].device).set_(state[name].untyped_storage())
        begin = state[name].storage_offset() * state[name].element_size() - layout.groups[group.name].tensors[name].offset
        pages.append([pool.as_strided((state[name].shape[0], layout.page_bytes), (layout.page_bytes, 1), begin)])
    return pages


def page_pieces(groups: Sequence[StateGroup], layout: PageLayout) -> list[list[PagePiece] | None]:
    """`PageMemory.pieces`: of groups of attention whose layers keep one tensor each."""
    found: list[list[PagePiece] | None] = []
    for group in groups:
        placed = list(layout.groups[group.name].tensors.values())
        if len(placed) != len(group.layers) or not all(isinstance(layer, (KVCacheSpec, LatentCacheSpec)) for layer in group.layers):
            found.append(None)
            continue
        pieces = []
        for layer, one in zip(group.layers, placed, strict=True):
            outer, heads = one.shape[:2] if isinstance(layer, KVCacheSpec) else (1, 1)
            whole = layer.whole_kv_heads if isinstance(layer, KVCacheSpec) else None
            pieces.append(PagePiece(one.offset, outer, heads, whole or heads, one.num_bytes // (outer * heads)))
        found.append(pieces)
    return found


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

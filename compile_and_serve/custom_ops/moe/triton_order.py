"""Sorts (token, expert) pairs by expert on the device, in blocks of one expert each, for grouped products.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), X experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    supports_pdl,
    wait_for_previous,
)

_MAX_TILE = 4096  # pairs that a program loads at once
_MAX_UNCOUNTED = 8192  # with more pairs, they are counted and placed by kernels of their own
_COUNT_TILE = 1024
_COUNT_ROWS = 16  # tiles whose counts are added at once


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """Pairs in blocks of block_size, each of one expert.

    pairs: int32 [max_blocks * block_size]: the numbers of the pairs, P where a block is not full. Entries of unused blocks are undefined.
    experts: int32 [max_blocks]: the expert of each block, -1 for an unused block.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    block_size: int

    @property
    def max_blocks(self) -> int:
        return self.experts.shape[0]


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, BINS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    pairs_P = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    ids_P = tl.load(ids_ptr + pairs_P, mask=pairs_P < num_pairs, other=BINS - 1)
    tl.store(counts_ptr + tile * BINS + tl.arange(0, BINS), tl.histogram(ids_P, BINS))


@triton.jit(do_not_specialize=["num_pairs", "num_counted_tiles", "max_blocks"])
def _order_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    block_experts_ptr,
    num_pairs,
    num_counted_tiles,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Each program counts the pairs of every expert, and then writes its own expert's blocks. With counts, `_place_kernel` places the pairs.
    expert = tl.program_id(0)
    bins_X = tl.arange(0, BINS)
    let_next_start(PDL)
    wait_for_previous(PDL)
    counts_X = tl.zeros((BINS,), dtype=tl.int32)
    if HAS_COUNTS:
        for start in range(0, num_counted_tiles, COUNT_ROWS):
            rows_R = start + tl.arange(0, COUNT_ROWS)
            at_RX = counts_ptr + rows_R[:, None] * BINS + bins_X[None, :]
            counts_X += tl.sum(tl.load(at_RX, mask=rows_R[:, None] < num_counted_tiles, other=0), 0)
    else:
        for start in range(0, num_pairs, TILE):
            pairs_P = start + tl.arange(0, TILE)
            ids_P = tl.load(ids_ptr + pairs_P, mask=pairs_P < num_pairs, other=BINS - 1)
            counts_X += tl.histogram(ids_P, BINS)
    counts_X = tl.where(bins_X < NUM_EXPERTS, counts_X, 0)  # the last bin counts what lies behind the last pair
    blocks_X = (counts_X + BLOCK_SIZE - 1) // BLOCK_SIZE
    count = tl.sum(tl.where(bins_X == expert, counts_X, 0), 0)
    first_block = tl.sum(tl.where(bins_X < expert, blocks_X, 0), 0)
    num_blocks = (count + BLOCK_SIZE - 1) // BLOCK_SIZE
    spots = tl.arange(0, BLOCK_SIZE)
    for block in range(0, num_blocks, BLOCK_SIZE):
        tl.store(block_experts_ptr + first_block + block + spots, expert, mask=block + spots < num_blocks)
    if expert == NUM_EXPERTS - 1:
        for block in range(first_block + num_blocks, max_blocks, BLOCK_SIZE):
            tl.store(block_experts_ptr + block + spots, -1, mask=block + spots < max_blocks)
    begin = first_block * BLOCK_SIZE
    tl.store(order_ptr + begin + count + spots, num_pairs, mask=count + spots < num_blocks * BLOCK_SIZE)
    placed = 0
    if count > 0 and not HAS_COUNTS:
        for start in range(0, num_pairs, TILE):
            pairs_P = start + tl.arange(0, TILE)
            ids_P = tl.load(ids_ptr + pairs_P, mask=pairs_P < num_pairs, other=BINS - 1)
            is_mine_P = (ids_P == expert).to(tl.int32)
            spots_P = placed + tl.cumsum(is_mine_P, 0) - 1
            tl.store(order_ptr + begin + spots_P, pairs_P, mask=is_mine_P > 0)
            placed += tl.sum(is_mine_P, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Each program places a tile of pairs: it sorts them by expert, and knows how many pairs of an expert the tiles before it have.
    tile = tl.program_id(0)
    bins_X = tl.arange(0, BINS)
    spots_P = tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    total_X = tl.zeros((BINS,), dtype=tl.int32)
    before_X = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, num_tiles, COUNT_ROWS):
        rows_R = start + tl.arange(0, COUNT_ROWS)
        at_RX = counts_ptr + rows_R[:, None] * BINS + bins_X[None, :]
        counts_RX = tl.load(at_RX, mask=rows_R[:, None] < num_tiles, other=0)
        total_X += tl.sum(counts_RX, 0)
        before_X += tl.sum(tl.where(rows_R[:, None] < tile, counts_RX, 0), 0)
    blocks_X = tl.where(bins_X < NUM_EXPERTS, (total_X + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    ids_P = tl.load(ids_ptr + tile * TILE + spots_P, mask=tile * TILE + spots_P < num_pairs, other=BINS - 1)
    here_X = tl.histogram(ids_P, BINS)
    keys_P = tl.sort(ids_P * TILE + spots_P)
    sorted_ids_P = keys_P // TILE
    # Where the expert's first pair of this tile goes, less its place in the sorted tile.
    shift_X = (tl.cumsum(blocks_X, 0) - blocks_X) * BLOCK_SIZE + before_X - (tl.cumsum(here_X, 0) - here_X)
    to_P = tl.gather(shift_X, sorted_ids_P, 0) + spots_P
    tl.store(order_ptr + to_P, tile * TILE + keys_P % TILE, mask=sorted_ids_P < NUM_EXPERTS)


def max_blocks(num_pairs: int, num_experts: int, block_size: int) -> int:
    """The largest number of blocks of any routing: each expert that has a pair may have one block that is not full."""
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (block_size - 1)) // block_size


def order_by_expert(ids_TK: torch.Tensor, num_experts: int, block_size: int) -> ExpertOrder:
    """Sort the pairs by expert, in their order within an expert. The host does not wait; the launches depend on T alone.

    ids_TK: int32 [T, K], contiguous, each at least 0; pairs of the id num_experts are left out. block_size: a power of 2.
    """
    num_pairs, device = ids_TK.numel(), ids_TK.device
    blocks = max_blocks(num_pairs, num_experts, block_size)
    order = ExpertOrder(
        pairs=torch.empty(blocks * block_size, dtype=torch.int32, device=device),
        experts=torch.empty(blocks, dtype=torch.int32, device=device),
        block_size=block_size,
    )
    bins = next_power_of_2(num_experts + 1)
    tile = min(_MAX_TILE, next_power_of_2(max(num_pairs, 32)))
    pdl = supports_pdl(device)
    counts, tiles = None, 0
    if num_pairs > _MAX_UNCOUNTED:
        tiles = cdiv(num_pairs, _COUNT_TILE)
        counts = torch.empty(tiles, bins, dtype=torch.int32, device=device)
        launch(_count_kernel, (tiles,), ids_TK, counts, num_pairs, BINS=bins, TILE=_COUNT_TILE, PDL=pdl, num_warps=4, **launch_options(pdl))
    launch(
        _order_kernel,
        (num_experts,),
        ids_TK,
        counts,
        order.pairs,
        order.experts,
        num_pairs,
        tiles,
        blocks,
        NUM_EXPERTS=num_experts,
        BINS=bins,
        BLOCK_SIZE=block_size,
        TILE=tile,
        HAS_COUNTS=counts is not None,
        COUNT_ROWS=_COUNT_ROWS,
        PDL=pdl,
        num_warps=4 if tile <= 1024 else 8,
        **launch_options(pdl),
    )
    if counts is not None:
        launch(
            _place_kernel,
            (tiles,),
            ids_TK,
            counts,
            order.pairs,
            num_pairs,
            tiles,
            NUM_EXPERTS=num_experts,
            BINS=bins,
            BLOCK_SIZE=block_size,
            TILE=_COUNT_TILE,
            COUNT_ROWS=_COUNT_ROWS,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return order

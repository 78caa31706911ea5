"""The configurations of the kernels in `triton_linear`, by a linear's size and number of tokens.

`benchmarks/ops_gpu_tune.py` measures them.
"""

from __future__ import annotations

from typing import NamedTuple

from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2

MAX_SMALL_TOKENS = 64
MAX_FEW_OUTPUTS, MAX_FEW_OUTPUTS_TOKENS = 128, 256
SMALL_BLOCK_O = 64  # rows of a tile of the tensor-core kernel


def gemv_config(num_rows: int, in_features: int, silu_mul: bool) -> tuple[int, int, int, int]:
    """(rows per block, warps, programs per multiprocessor, MiB to prefetch into L2) of the 1-token kernel.

    The programs just fill a multiprocessor's registers. So when they start while the previous kernel still runs, no multiprocessor gets
    more than its share of the rows. A tile has 256 columns for each warp: fewer warps where whole tiles would go far beyond the row.
    """
    rows, warps, per_sm = (4, 4, 4) if silu_mul or in_features < 2048 else (8, 8, 2)
    while warps > 2 and cdiv(in_features, 256 * warps) * 256 * warps > 1.1 * in_features:
        warps, per_sm = warps // 2, per_sm * 2
    return rows, warps, per_sm, 16


class SmallBatchConfig(NamedTuple):
    """Tiles of block_o rows, block_i columns at once and up to block_t tokens. splits: programs that share a tile's columns.
    prefetch: whether a program prefetches its weights into L2 while the previous kernel still runs. SiLU-mul does not prefetch.
    """

    block_o: int
    block_i: int
    splits: int
    stages: int
    warps: int
    block_t: int = MAX_SMALL_TOKENS
    prefetch: bool = False


def small_batch_config(num_tokens: int, num_rows: int, in_features: int, silu_mul: bool, sms: int) -> SmallBatchConfig:
    """The configuration of `_small_batch_kernel` for 2 to MAX_SMALL_TOKENS tokens, all in one tile."""
    tiles, splits = cdiv(num_rows, SMALL_BLOCK_O), 1
    while 3 * tiles * splits < 2 * sms and splits < 8 and in_features >= 512 * splits:
        splits *= 2
    if num_tokens <= (16 if silu_mul else 32):  # for more tokens, shared memory does not hold tiles of 256 columns
        return SmallBatchConfig(SMALL_BLOCK_O, 256, splits, 3, 4)
    if splits > 1 and tiles * splits > sms and not silu_mul:
        # A multiprocessor holds one program of four stages, so the last programs would run alone. It holds two of three stages.
        return SmallBatchConfig(SMALL_BLOCK_O, 128, _used_splits(in_features, 128, min(8, 2 * sms // tiles)), 3, 4)
    return SmallBatchConfig(SMALL_BLOCK_O, 128, splits, 4, 4)


def few_outputs_config(num_rows: int, in_features: int) -> SmallBatchConfig:
    """The configuration of `_small_batch_kernel` for up to MAX_FEW_OUTPUTS rows: only small tiles give enough programs."""
    block_o = max(16, next_power_of_2(num_rows))
    return SmallBatchConfig(block_o, 256, _used_splits(in_features, 256, 8), 3, 4, block_t=16, prefetch=in_features % 8 == 0)


def _used_splits(in_features: int, block_i: int, max_splits: int) -> int:
    """The number of splits, up to max_splits, that have columns if each has the same number of blocks."""
    blocks = cdiv(in_features, block_i)
    return cdiv(blocks, cdiv(blocks, max_splits))

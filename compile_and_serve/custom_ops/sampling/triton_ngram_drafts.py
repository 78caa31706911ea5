"""The Triton kernel behind `ngram_drafts.find_drafts`. Shape legend: see there; B tokens of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.build.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv

_BLOCK = 2048  # positions per program


@triton.jit
def _match_kernel(
    history_ptr, slots_ptr, lengths_ptr, best_ptr, width, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK
    length = tl.load(lengths_ptr + seq)
    if begin < length:
        row_ptr = history_ptr + tl.load(slots_ptr + seq) * width
        ends_B = begin + tl.arange(0, BLOCK)
        is_equal_B = ends_B < length  # a token follows
        match_len_B = tl.zeros((BLOCK,), tl.int64)
        for n in tl.static_range(1, LONGEST + 1):
            last = tl.load(row_ptr + length - n, mask=length >= n, other=-1)
            before_B = tl.load(row_ptr + ends_B - n, mask=is_equal_B & (ends_B >= n), other=-2)
            is_equal_B = is_equal_B & (before_B == last)
            match_len_B += is_equal_B.to(tl.int64)
        keys_B = tl.where(match_len_B >= SHORTEST, match_len_B * width + ends_B, 0)
        best = tl.max(keys_B, axis=0)
        if best > 0:
            tl.atomic_max(best_ptr + seq, best)


def find_matches(
    history_RW: torch.Tensor, slots_S: torch.Tensor, lengths_S: torch.Tensor, shortest: int, longest: int
) -> torch.Tensor:
    """int64 [S]: the position behind the best match of each sequence; 0 where there is none. Arguments as in `find_drafts`."""
    width = history_RW.shape[1]
    best_S = torch.zeros_like(slots_S)
    launch(
        _match_kernel, (slots_S.shape[0], cdiv(width, _BLOCK)),
        history_RW, slots_S, lengths_S, best_S, width, SHORTEST=shortest, LONGEST=longest, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return best_S % width

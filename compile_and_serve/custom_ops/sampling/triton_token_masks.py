"""Excludes tokens from sampling by bit masks, in one launch for all rows.

Shape legend: S rows of logits, V vocabulary, M masked rows, W words of a mask (32 tokens each).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv

_BLOCK = 4096


@triton.jit(do_not_specialize=["vocab", "logits_stride", "mask_stride"])
def _mask_kernel(logits_ptr, masks_ptr, rows_ptr, vocab, logits_stride, mask_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    token_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token_B = token_B < vocab
    word_B = tl.load(masks_ptr + index * mask_stride + token_B // 32, mask=is_token_B, other=-1)
    is_excluded_B = ((word_B >> (token_B % 32)) & 1) == 0
    excluded_B = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token_B, excluded_B, mask=is_token_B & is_excluded_B)


def mask_tokens(logits_SV: torch.Tensor, masks_MW: torch.Tensor, rows_M: torch.Tensor) -> None:
    """logits[rows[m], v] = -inf where bit v % 32 of masks[m, v // 32] is 0, in place.

    logits_SV: any floating dtype, rows may be strided. masks_MW: int32, 32 · W >= V, rows may be strided. rows_M: int32, all different.
    """
    vocab = logits_SV.shape[1]
    launch(
        _mask_kernel,
        (rows_M.shape[0], cdiv(vocab, _BLOCK)),
        logits_SV,
        masks_MW,
        rows_M,
        vocab,
        logits_SV.stride(0),
        masks_MW.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )

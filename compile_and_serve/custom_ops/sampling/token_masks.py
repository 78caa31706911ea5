"""Excludes tokens from sampling by bit masks.

Shape legend: S rows of logits, V vocabulary, M masked rows, W words of a mask (32 tokens each).
"""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of


def mask_tokens(logits_SV: torch.Tensor, masks_MW: torch.Tensor, rows_M: torch.Tensor) -> None:
    """logits[rows[m], v] = -inf where bit v % 32 of masks[m, v // 32] is 0, in place.

    logits_SV: any floating dtype. masks_MW, rows_M: int32; 32 · W >= V, and the rows are all different.
    """
    if platform_of(logits_SV.device).runs_triton_kernels:
        from compile_and_serve.custom_ops.sampling.triton_token_masks import mask_tokens as mask_with_triton

        mask_with_triton(logits_SV, masks_MW, rows_M)
        return
    vocab = logits_SV.shape[1]
    masks = masks_MW.contiguous().numpy().view(np.uint8)
    for mask, row in zip(masks, rows_M.tolist(), strict=True):
        bits = np.unpackbits(mask, count=vocab, bitorder="little")
        np.logical_not(bits, out=bits.view(np.bool_))
        logits_SV[row].masked_fill_(torch.from_numpy(bits.view(np.bool_)), float("-inf"))

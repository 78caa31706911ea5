"""Token masks: the Triton kernel (in its interpreter) and the CPU's path against a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.sampling import token_masks, triton_token_masks

MaskTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("mask_tokens", [token_masks.mask_tokens, triton_token_masks.mask_tokens], ids=["cpu", "triton"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_excluded_tokens_become_minus_infinity(mask_tokens: MaskTokens, vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    storage = torch.from_numpy(rng.standard_normal((6, vocab + 3))).to(dtype)
    logits = storage[:, :vocab]  # strided rows
    words = -(-vocab // 32) + 1
    masks = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, words), dtype=np.int64).astype(np.int32))
    rows = torch.tensor([4, 0, 3], dtype=torch.int32)
    expected = storage.clone()
    for mask, row in zip(masks.tolist(), rows.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = float("-inf")
    mask_tokens(logits, masks, rows)
    torch.testing.assert_close(storage, expected, rtol=0, atol=0)

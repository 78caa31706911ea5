"""The int8 KV cache: the values of each token and head have a float32 scale, largest |x| / 127, computed when they are written.

Shape legend: N cache blocks, K key/value heads, P tokens per block, E head size.

A head's keys (or values) of a block are P · E bytes of int8 [P, E], then P scales. The cache's tensor is int8 [N, 2, K, P, E + 4]: its
last two dimensions are these bytes. So a block's scales go wherever its bytes go, and rows of values begin at multiples of E bytes.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.state.tokens import SCALE_BYTES


def int8_parts(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a cache int8 [N, 2, K, P, E + 4] with contiguous heads: its values int8 [N, 2, K, P, E] and scales float32 [N, 2, K, P].

    E: a multiple of 4.
    """
    *outer, block_size, width = kv_cache.shape
    head_dim = width - SCALE_BYTES
    strides = kv_cache.stride()[:3]
    values = kv_cache.as_strided((*outer, block_size, head_dim), (*strides, head_dim, 1))
    words = kv_cache.view(torch.float32)
    scales = words.as_strided((*outer, block_size), (*words.stride()[:3], 1), words.storage_offset() + block_size * head_dim // SCALE_BYTES)
    return values, scales

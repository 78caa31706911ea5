"""Cached keys and values of whole sequences, gathered from their pages and converted to the model's dtype.

Shape legend: N cache blocks, P tokens per block, K key/value heads, E head size, J pages, C tokens of all sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.triton_int8 import scales_of
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.state.tokens import SCALE_BYTES
from compile_and_serve.custom_ops.triton_common import next_power_of_2


@triton.jit(do_not_specialize=["num_pages"])
def _expand_pages_kernel(
    kv_ptr,
    pages_ptr,
    keys_ptr,
    values_ptr,
    block_stride,
    num_pages,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    page, kv_head = tl.program_id(0), tl.program_id(1)
    block = tl.load(pages_ptr + page)
    row = tl.load(pages_ptr + num_pages + page)
    count = tl.load(pages_ptr + 2 * num_pages + page)
    tokens_P, cols_E = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    ok_PE = (tokens_P < count)[:, None] & (cols_E < HEAD_DIM)[None, :]
    is_int8: tl.constexpr = kv_ptr.dtype.element_ty == tl.int8
    PAGE: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4 if is_int8 else HEAD_DIM)  # keys or values of one head in a block
    keys = kv_ptr + block * block_stride + kv_head * PAGE
    at_PE = keys + tokens_P[:, None] * HEAD_DIM + cols_E
    to_PE = (row + tokens_P)[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + cols_E[None, :]
    dtype = keys_ptr.dtype.element_ty
    k_PE = tl.load(at_PE, mask=ok_PE).to(tl.float32)
    v_PE = tl.load(at_PE + NUM_KV_HEADS * PAGE, mask=ok_PE).to(tl.float32)
    if is_int8:
        scale_P = scales_of(keys, BLOCK_SIZE, HEAD_DIM) + tokens_P
        k_PE *= tl.load(scale_P, mask=tokens_P < count)[:, None]
        v_PE *= tl.load(scale_P + NUM_KV_HEADS * PAGE // 4, mask=tokens_P < count)[:, None]
    tl.store(keys_ptr + to_PE, k_PE.to(dtype), mask=ok_PE)
    tl.store(values_ptr + to_PE, v_PE.to(dtype), mask=ok_PE)


def expand_pages(kv_cache: torch.Tensor, pages_3J: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """→ keys, values: [C, K, E] of `dtype`, contiguous.

    kv_cache: [N, 2, K, P, E], 8-bit or a wider dtype. pages_3J: int64; for each page its block in the cache, the row of the result
    where its first token goes, and how many of its tokens are used. num_tokens: C.
    """
    _, _, num_kv_heads, block_size, width = kv_cache.shape
    head_dim = width - SCALE_BYTES if kv_cache.dtype == torch.int8 else width
    keys_CKE = torch.empty(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=kv_cache.device)
    values_CKE = torch.empty_like(keys_CKE)
    num_pages = pages_3J.shape[1]
    launch(
        _expand_pages_kernel,
        (num_pages, num_kv_heads),
        kv_cache,
        pages_3J,
        keys_CKE,
        values_CKE,
        kv_cache.stride(0),
        num_pages,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_P=next_power_of_2(block_size),
        BLOCK_E=next_power_of_2(head_dim),
        num_warps=4,
    )
    return keys_CKE, values_CKE

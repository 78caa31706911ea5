"""QK-norm, rotary embedding and paged KV write of one layer in one kernel.

Shape legend: T tokens, H query heads, K key/value heads, E head size, R = E / 2, N cache blocks, P tokens per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.triton_int8 import int8_scale, scales_of, to_int8
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    supports_pdl,
    to_cache,
    wait_for_previous,
)


@triton.jit
def load_norm_rope(
    heads_ptr,
    ok_N,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    row_stride_N,
    eps,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """Both halves [N, R] of N heads, normalized and rotated in float32, with one rounding to `dtype`.

    heads_ptr: first element. row_stride_N: offset of each head. cos_ptr, sin_ptr: the token's row. Rows outside ok_N are zero.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    cols_R = tl.arange(0, BLOCK_R)
    col_ok_R = cols_R < HALF
    ok_NR = ok_N[:, None] & col_ok_R[None, :]
    at_NR = heads_ptr + row_stride_N[:, None] + cols_R[None, :]
    low_NR = tl.load(at_NR, mask=ok_NR, other=0.0).to(tl.float32)
    high_NR = tl.load(at_NR + HALF, mask=ok_NR, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean_N = (tl.sum(low_NR * low_NR, 1) + tl.sum(high_NR * high_NR, 1)) / HEAD_DIM
        inverse_rms_N = 1.0 / tl.sqrt_rn(mean_N + eps)
        low_NR *= inverse_rms_N[:, None] * tl.load(weight_ptr + cols_R, mask=col_ok_R, other=0.0).to(tl.float32)[None, :]
        high_NR *= inverse_rms_N[:, None] * tl.load(weight_ptr + HALF + cols_R, mask=col_ok_R, other=0.0).to(tl.float32)[None, :]
    if HAS_ROPE:
        cos_R = tl.load(cos_ptr + cols_R, mask=col_ok_R, other=0.0).to(tl.float32)[None, :]
        sin_R = tl.load(sin_ptr + cols_R, mask=col_ok_R, other=0.0).to(tl.float32)[None, :]
        rotated_NR = low_NR * cos_R - high_NR * sin_R
        high_NR = high_NR * cos_R + low_NR * sin_R
        low_NR = rotated_NR
    return low_NR.to(dtype), high_NR.to(dtype)


@triton.jit
def _rope_kv_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_out_ptr, k_out_ptr, kv_ptr, slot_ptr,
    q_stride, k_stride, v_stride, cos_stride, block_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    WRITE_Q: tl.constexpr, WRITE_K: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    is_int8: tl.constexpr = kv_ptr.dtype.element_ty == tl.int8
    PAGE: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 4 if is_int8 else HEAD_DIM)  # keys or values of one head in a block
    Q_PARTS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H if WRITE_Q else 0
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    cols_R = tl.arange(0, BLOCK_R)
    cos_row, sin_row = cos_ptr, sin_ptr
    if HAS_ROPE:
        cos_row, sin_row = cos_ptr + token * cos_stride, sin_ptr + token * cos_stride
    let_next_start(PDL)
    wait_for_previous(PDL)
    if part < Q_PARTS:
        heads_H = part * BLOCK_H + tl.arange(0, BLOCK_H)
        ok_H = heads_H < NUM_HEADS
        low_HR, high_HR = load_norm_rope(
            q_ptr + token * q_stride,
            ok_H,
            cos_row,
            sin_row,
            q_norm_ptr,
            heads_H * HEAD_DIM,
            eps,
            dtype,
            HEAD_DIM,
            BLOCK_R,
            HAS_Q_NORM,
            HAS_ROPE,
        )
        ok_HR = ok_H[:, None] & (cols_R < HALF)[None, :]
        out_HR = q_out_ptr + token * NUM_HEADS * HEAD_DIM + heads_H[:, None] * HEAD_DIM + cols_R[None, :]
        tl.store(out_HR, low_HR, mask=ok_HR)
        tl.store(out_HR + HALF, high_HR, mask=ok_HR)
    else:
        slot = tl.load(slot_ptr + token)
        if slot >= 0:
            heads_K = (part - Q_PARTS) * BLOCK_K + tl.arange(0, BLOCK_K)
            ok_K = heads_K < NUM_KV_HEADS
            low_KR, high_KR = load_norm_rope(
                k_ptr + token * k_stride,
                ok_K,
                cos_row,
                sin_row,
                k_norm_ptr,
                heads_K * HEAD_DIM,
                eps,
                dtype,
                HEAD_DIM,
                BLOCK_R,
                HAS_K_NORM,
                HAS_ROPE,
            )
            ok_KR = ok_K[:, None] & (cols_R < HALF)[None, :]
            pages_K = kv_ptr + (slot // BLOCK_SIZE) * block_stride + heads_K * PAGE
            at_KR = pages_K[:, None] + (slot % BLOCK_SIZE) * HEAD_DIM + cols_R[None, :]
            v_KR = v_ptr + token * v_stride + heads_K[:, None] * HEAD_DIM + cols_R[None, :]
            v_low_KR = tl.load(v_KR, mask=ok_KR, other=0.0)
            v_high_KR = tl.load(v_KR + HALF, mask=ok_KR, other=0.0)
            if WRITE_K:
                k_out_KR = k_out_ptr + token * NUM_KV_HEADS * HEAD_DIM + heads_K[:, None] * HEAD_DIM + cols_R[None, :]
                tl.store(k_out_KR, low_KR, mask=ok_KR)
                tl.store(k_out_KR + HALF, high_KR, mask=ok_KR)
            to_values: tl.constexpr = NUM_KV_HEADS * PAGE
            if is_int8:
                k_scale_K, v_scale_K = int8_scale(low_KR, high_KR), int8_scale(v_low_KR, v_high_KR)
                low_KR, high_KR = to_int8(low_KR, k_scale_K), to_int8(high_KR, k_scale_K)
                v_low_KR, v_high_KR = to_int8(v_low_KR, v_scale_K), to_int8(v_high_KR, v_scale_K)
                offset = slot % BLOCK_SIZE
                tl.store(scales_of(pages_K, BLOCK_SIZE, HEAD_DIM) + offset, k_scale_K, mask=ok_K)
                tl.store(scales_of(pages_K + to_values, BLOCK_SIZE, HEAD_DIM) + offset, v_scale_K, mask=ok_K)
            tl.store(at_KR, to_cache(low_KR, kv_ptr), mask=ok_KR)
            tl.store(at_KR + HALF, to_cache(high_KR, kv_ptr), mask=ok_KR)
            tl.store(at_KR + to_values, to_cache(v_low_KR, kv_ptr), mask=ok_KR)
            tl.store(at_KR + to_values + HALF, to_cache(v_high_KR, kv_ptr), mask=ok_KR)


def split_qkv(qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q [T, H, E], k and v [T, K, E] of qkv [T, (H + 2K) * E] (rows may be strided)."""
    heads_TNE = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q_THE, k_TKE, v_TKE = heads_TNE.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q_THE, k_TKE, v_TKE


def heads_contiguous(x_TNE: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows of heads; copied only if they are not."""
    return x_TNE if x_TNE.stride(2) == 1 and x_TNE.stride(1) == x_TNE.shape[2] else x_TNE.contiguous()


def rope_kv_write(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    cos_TE: torch.Tensor | None,
    sin_TE: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    q_norm_weight_E: torch.Tensor | None = None,
    k_norm_weight_E: torch.Tensor | None = None,
    eps: float = 1e-6,
    write_q: bool = True,
    k_out_TKE: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write rope(norm(k)) and v to the cache at slot_mapping and return rope(norm(q)). Without weights no norm, without cos no rope.

    q_THE: [T, H, E]; k_TKE, v_TKE: [T, K, E], rows may be strided; cos_TE, sin_TE: [T, E] with equal halves, contiguous rows;
    kv_cache: [N, 2, K, P, E] (mutated), q's dtype, float8_e4m3fn or int8; slot_mapping_T: int64 [T], -1 is skipped. k_out_TKE: contiguous,
    also gets the keys, in q's dtype (not where the slot is -1). write_q: otherwise q is returned unchanged. → [T, H, E]
    """
    q_THE, k_TKE, v_TKE = heads_contiguous(q_THE), heads_contiguous(k_TKE), heads_contiguous(v_TKE)
    num_tokens, num_heads, head_dim = q_THE.shape
    num_kv_heads, block_size = k_TKE.shape[1], kv_cache.shape[3]
    q_out = q_THE.new_empty(num_tokens, num_heads, head_dim) if write_q else q_THE
    if num_tokens == 0:
        return q_out
    block_h = min(8 if num_tokens < 64 else 32, next_power_of_2(num_heads))
    block_k = min(8, next_power_of_2(num_kv_heads))
    parts = (cdiv(num_heads, block_h) if write_q else 0) + cdiv(num_kv_heads, block_k)
    pdl = supports_pdl(q_THE.device)
    launch(
        _rope_kv_kernel, (num_tokens, parts),
        q_THE, k_TKE, v_TKE, cos_TE, sin_TE, q_norm_weight_E, k_norm_weight_E, q_out, k_out_TKE, kv_cache, slot_mapping_T,
        q_THE.stride(0), k_TKE.stride(0), v_TKE.stride(0), cos_TE.stride(0) if cos_TE is not None else 0, kv_cache.stride(0), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_H=block_h, BLOCK_K=block_k, BLOCK_R=next_power_of_2(head_dim // 2),
        WRITE_Q=write_q, WRITE_K=k_out_TKE is not None, HAS_Q_NORM=q_norm_weight_E is not None, HAS_K_NORM=k_norm_weight_E is not None,
        HAS_ROPE=cos_TE is not None, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return q_out

"""Attention both ways within packed segments, in the style of FlashAttention, with a window and biases by distance.

Shape legend: N rows of the step, S segments, H query heads, K key/value heads, E head size, F distances, R columns of a bias, Q query rows
per tile, C key rows per tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.attention.triton_scores import LOG2_E
from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2


@triton.jit
def _encoder_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, columns_ptr, distance_ptr, query_ptr, key_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, num_distances, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, LOG2: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + segment)
    length = tl.load(starts_ptr + segment + 1) - begin
    first = tl.program_id(0) * BLOCK_Q
    if first >= length:
        return
    rows_Q = first + tl.arange(0, BLOCK_Q)
    cols_E = tl.arange(0, BLOCK_E)
    ok_E, ok_Q = cols_E < HEAD_DIM, rows_Q < length
    at_Q = (begin + rows_Q).to(tl.int64)
    ok_QE = ok_Q[:, None] & ok_E[None, :]
    q_QE = tl.load(q_ptr + at_Q[:, None] * q_stride + head * q_head_stride + cols_E[None, :], mask=ok_QE, other=0.0)
    max_Q = tl.full((BLOCK_Q,), -1e30, tl.float32)
    sum_Q = tl.zeros((BLOCK_Q,), tl.float32)
    acc_QE = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    low, high = 0, length
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW, 0) // BLOCK_C * BLOCK_C
        high = tl.minimum(first + BLOCK_Q + WINDOW, length)
    for start in tl.range(low, high, BLOCK_C):
        keys_C = start + tl.arange(0, BLOCK_C)
        ok_C = keys_C < length
        at_C = (begin + keys_C).to(tl.int64)
        ok_CE = ok_C[:, None] & ok_E[None, :]
        k_CE = tl.load(k_ptr + at_C[:, None] * k_stride + head // GROUP * k_head_stride + cols_E[None, :], mask=ok_CE, other=0.0)
        v_CE = tl.load(v_ptr + at_C[:, None] * v_stride + head // GROUP * v_head_stride + cols_E[None, :], mask=ok_CE, other=0.0)
        scores_QC = tl.dot(q_QE, tl.trans(k_CE), input_precision="ieee") * scale
        ok_QC = ok_Q[:, None] & ok_C[None, :]
        distance_QC = keys_C[None, :] - rows_Q[:, None]
        if HAS_BIAS:
            place_QC = tl.minimum(tl.maximum(distance_QC + num_distances // 2, 0), num_distances - 1)
            column_QC = tl.load(columns_ptr + place_QC)
            if HAS_DISTANCE:
                scores_QC += tl.load(distance_ptr + head * COLUMNS + column_QC).to(tl.float32)
            if HAS_QUERY:
                by_Q = query_ptr + (at_Q * NUM_HEADS + head) * COLUMNS
                scores_QC += tl.load(by_Q[:, None] + column_QC, mask=ok_QC, other=0.0).to(tl.float32)
            if HAS_KEY:
                by_C = key_ptr + (at_C * NUM_HEADS + head) * COLUMNS
                scores_QC += tl.load(by_C[None, :] + column_QC, mask=ok_QC, other=0.0).to(tl.float32)
        seen_QC = ok_QC
        if WINDOW > 0:
            seen_QC = ok_QC & (distance_QC <= WINDOW) & (distance_QC >= -WINDOW)
        scores_QC = tl.where(seen_QC, scores_QC * LOG2, float("-inf"))
        # A row may see no key of the tile. A finite maximum keeps it from becoming NaN.
        new_max_Q = tl.maximum(tl.maximum(max_Q, tl.max(scores_QC, 1)), -1e30)
        factor_Q = tl.exp2(max_Q - new_max_Q)
        weights_QC = tl.exp2(scores_QC - new_max_Q[:, None])
        sum_Q = sum_Q * factor_Q + tl.sum(weights_QC, 1)
        acc_QE = acc_QE * factor_Q[:, None] + tl.dot(weights_QC.to(v_CE.dtype), v_CE, input_precision="ieee")
        max_Q = new_max_Q
    out_QE = acc_QE / tl.maximum(sum_Q, 1e-30)[:, None]
    at_QE = (at_Q[:, None] * NUM_HEADS + head) * HEAD_DIM + cols_E[None, :]
    tl.store(out_ptr + at_QE, out_QE.to(out_ptr.dtype.element_ty), mask=ok_QE)


def triton_encoder_attention(
    q_NHE: torch.Tensor,
    k_NKE: torch.Tensor,
    v_NKE: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    columns_F: torch.Tensor | None,
    distance_bias_HR: torch.Tensor | None,
    query_bias_NHR: torch.Tensor | None,
    key_bias_NHR: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale · q kᵀ + biases) v within each segment. → contiguous [N, H, E]; rows outside of segments get zeros

    q_NHE, k_NKE, v_NKE: heads are contiguous. starts: int32 [S + 1], of segments of at most `longest` rows. The others as in
    `encoder_attention.py`; a bias of queries or keys is the product itself.
    """
    num_rows, num_heads, head_dim = q_NHE.shape
    out_NHE = q_NHE.new_zeros(num_rows, num_heads, head_dim)
    biases = [None if one is None else one.contiguous() for one in (distance_bias_HR, query_bias_NHR, key_bias_NHR)]
    columns = next((one.shape[-1] for one in biases if one is not None), 1)
    block_e = max(16, next_power_of_2(head_dim))
    block_q, block_c = (64, 32) if q_NHE.dtype == torch.float32 or block_e > 128 else (64, 64)
    num_distances = 0 if columns_F is None else columns_F.shape[0]
    launch(
        _encoder_kernel, (cdiv(longest, block_q), starts.shape[0] - 1, num_heads),
        q_NHE, k_NKE, v_NKE, out_NHE, starts, columns_F, *biases,
        q_NHE.stride(0), q_NHE.stride(1), k_NKE.stride(0), k_NKE.stride(1), v_NKE.stride(0), v_NKE.stride(1), num_distances, scale,
        NUM_HEADS=num_heads, GROUP=num_heads // k_NKE.shape[1], HEAD_DIM=head_dim, COLUMNS=columns, WINDOW=window,
        BLOCK_Q=block_q, BLOCK_C=block_c, BLOCK_E=block_e, LOG2=LOG2_E, HAS_BIAS=columns_F is not None,
        HAS_DISTANCE=biases[0] is not None, HAS_QUERY=biases[1] is not None, HAS_KEY=biases[2] is not None, num_warps=4,
    )  # fmt: skip
    return out_NHE

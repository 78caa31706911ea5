"""For comparison: decodes of linear attention that write the whole state in each step, as engines without a ring of entries do."""

from __future__ import annotations

import triton
import triton.language as tl

from compile_and_serve.custom_ops.recurrent import triton_linear_attention
from compile_and_serve.custom_ops.recurrent.triton_linear_attention import unit_offset


@triton.jit
def _each_step_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr,
    checkpoint_ptr, checkpoint_columns_ptr, keys_ptr, keys_columns_ptr, values_ptr, values_columns_ptr, decays_ptr, decays_columns_ptr,
    start_loc_ptr, seq_lens_ptr, read_ptr, write_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    checkpoint_stride, keys_stride, values_stride, decays_stride, read_stride, write_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    CHECKPOINT_UNITS: tl.constexpr, KEY_UNITS: tl.constexpr, VALUE_UNITS: tl.constexpr, DECAY_UNITS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One new token of each sequence. The state lies where the checkpoint does, and its position where that of the checkpoint does: after a
    prompt it lacks the entries since then.
    """
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    D: tl.constexpr = K if PER_CHANNEL else 1
    length = tl.load(seq_lens_ptr + seq)
    token = tl.load(start_loc_ptr + seq).to(tl.int64)
    if (length > 0) & (tl.load(start_loc_ptr + seq + 1) > token):
        computed = length - 1
        key_head = head // GROUP
        read, write = read_ptr + seq * read_stride, write_ptr + seq * write_stride
        rows_K, cols_C = tl.arange(0, BLOCK_K), block * BLOCK_C + tl.arange(0, BLOCK_C)
        ok_K, ok_C = rows_K < K, cols_C < V
        state_KC = rows_K[:, None] * V + cols_C[None, :]
        ok_KC = ok_K[:, None] & ok_C[None, :]
        values = values_ptr + unit_offset(values_columns_ptr, read, head, values_stride, VALUE_UNITS, (RING + 1) * V)
        new_values = values_ptr + unit_offset(values_columns_ptr, write, head, values_stride, VALUE_UNITS, (RING + 1) * V)
        keys = keys_ptr + unit_offset(keys_columns_ptr, read, key_head, keys_stride, KEY_UNITS, RING * K)
        decays = decays_ptr + unit_offset(decays_columns_ptr, read, head, decays_stride, DECAY_UNITS, RING * D)
        source = unit_offset(checkpoint_columns_ptr, read, head, checkpoint_stride, CHECKPOINT_UNITS, K * V)
        target = unit_offset(checkpoint_columns_ptr, write, head, checkpoint_stride, CHECKPOINT_UNITS, K * V)
        begin = tl.load(values + RING * V + block * BLOCK_C).to(tl.int32)
        begin = tl.minimum(tl.maximum(begin, tl.maximum(0, computed - RING + 1)), computed)
        state = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
        if begin > 0:
            state = tl.load(checkpoint_ptr + source + state_KC, mask=ok_KC, other=0.0).to(tl.float32)
        for position in range(begin, computed):
            entry = position % RING
            entry_k_K = tl.load(keys + entry * K + rows_K, mask=ok_K, other=0.0).to(tl.float32)
            entry_u_C = tl.load(values + entry * V + cols_C, mask=ok_C, other=0.0)
            if PER_CHANNEL:
                state = state * tl.exp(tl.load(decays + entry * K + rows_K, mask=ok_K, other=0.0))[:, None]
            else:
                state = state * tl.exp(tl.load(decays + entry))
            state += entry_k_K[:, None] * entry_u_C[None, :]
        k_K = tl.load(k_ptr + token * k_stride + key_head * k_head_stride + rows_K, mask=ok_K, other=0.0).to(tl.float32)
        q_K = tl.load(q_ptr + token * q_stride + key_head * q_head_stride + rows_K, mask=ok_K, other=0.0).to(tl.float32)
        u_C = tl.load(v_ptr + token * v_stride + head * v_head_stride + cols_C, mask=ok_C, other=0.0).to(tl.float32)
        if PER_CHANNEL:
            state = state * tl.exp(tl.load(decay_ptr + (token * NUM_HEADS + head) * K + rows_K, mask=ok_K, other=0.0))[:, None]
        else:
            state = state * tl.exp(tl.load(decay_ptr + token * NUM_HEADS + head))
        if HAS_BETA:
            u_C = tl.load(beta_ptr + token * NUM_HEADS + head) * (u_C - tl.sum(state * k_K[:, None], axis=0))
        state += k_K[:, None] * u_C[None, :]
        out_C = tl.sum(state * q_K[:, None], axis=0)
        tl.store(out_ptr + (token * NUM_HEADS + head) * V + cols_C, out_C.to(out_ptr.dtype.element_ty), mask=ok_C)
        tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)
        tl.store(new_values + RING * V + cols_C, tl.zeros((BLOCK_C,), tl.float32) + length.to(tl.float32), mask=ok_C)


def write_each_step() -> None:
    """From now on decodes run this kernel in this process. Rolling back, as for drafts, is not possible then."""
    triton_linear_attention._linear_attention_decode_kernel = _each_step_kernel

"""Linear attention of a few new tokens per sequence, in one kernel.

Shape legend: S sequences, H value heads, G key heads, K key size, V value size, C columns of the values in a program, R ring entries,
B entries in a block.

A program has one head's state for a block of value columns in registers: the checkpoint, plus the entries since then, 16 at a time, which
is one small product. The state at the next checkpoint's position is stored when it is passed. Then come the new tokens, one by one.

Programs of the same head read each other's entries of earlier tokens while they write those of new ones: a ring is long enough for both if
a step has few tokens (`layer_state.py`). The checkpoint's position is stored in each column of the values, so that each program has its
own. Steps of more tokens are computed in two parts: up to the next checkpoint, whose tokens leave no entries, and from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.recurrent import fla_prompts
from compile_and_serve.custom_ops.recurrent.fla_prompts import Operands, States
from compile_and_serve.custom_ops.recurrent.layer_state import CHECKPOINT_TOKENS, ROLLBACK_TOKENS
from compile_and_serve.custom_ops.triton_common import cdiv, next_power_of_2

BLOCK = tl.constexpr(CHECKPOINT_TOKENS)
DECODE_COLUMNS, DECODE_WARPS = 64, 2  # of a program of the kernel for one new token
# What a launch computes: all; the tokens before the next checkpoint; those from there on; only the state that the step begins with.
ALL, TO_CHECKPOINT, FROM_CHECKPOINT, TO_BEGIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def unit_offset(columns_ptr, pages_ptr, unit, page_stride, UNITS: tl.constexpr, SIZE: tl.constexpr):
    """Where a unit lies of the sequence whose row of pages is given: elements from the state's beginning."""
    page = tl.load(pages_ptr + tl.load(columns_ptr + unit // UNITS)).to(tl.int64)
    return page * page_stride + (unit % UNITS) * SIZE


@triton.jit(do_not_specialize=["first_seq"])
def _linear_attention_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, states_ptr, states_stride, first_seq,
    checkpoint_ptr, checkpoint_columns_ptr, keys_ptr, keys_columns_ptr, values_ptr, values_columns_ptr, decays_ptr, decays_columns_ptr,
    start_loc_ptr, seq_lens_ptr, read_ptr, write_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    checkpoint_stride, keys_stride, values_stride, decays_stride, read_stride, write_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    CHECKPOINT_UNITS: tl.constexpr, KEY_UNITS: tl.constexpr, VALUE_UNITS: tl.constexpr, DECAY_UNITS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    D: tl.constexpr = K if PER_CHANNEL else 1
    HAS_STATES: tl.constexpr = PART == FROM_CHECKPOINT and states_ptr is not None
    length = tl.load(seq_lens_ptr + seq)
    start = tl.load(start_loc_ptr + seq)
    computed = length - (tl.load(start_loc_ptr + seq + 1) - start)
    # Where the checkpoint will lie (`layer_state.py`).
    end = tl.maximum(computed, length - (RING - BLOCK - 1) // 2) // BLOCK * BLOCK
    has_work = (length > 0) & (computed < length)
    if PART == TO_CHECKPOINT or PART == TO_BEGIN:  # noqa: SIM109  Triton has no `in`
        has_work &= end > computed
    if has_work:
        key_head = head // GROUP
        read, write = read_ptr + seq * read_stride, write_ptr + seq * write_stride
        rows_K, cols_C, entries_B = tl.arange(0, BLOCK_K), block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK)
        ok_K, ok_C = rows_K < K, cols_C < V
        is_first = block == 0
        state_KC = rows_K[:, None] * V + cols_C[None, :]
        ok_KC = ok_K[:, None] & ok_C[None, :]
        old_values = values_ptr + unit_offset(values_columns_ptr, read, head, values_stride, VALUE_UNITS, (RING + 1) * V)
        new_values = values_ptr + unit_offset(values_columns_ptr, write, head, values_stride, VALUE_UNITS, (RING + 1) * V)
        old_keys = keys_ptr + unit_offset(keys_columns_ptr, read, key_head, keys_stride, KEY_UNITS, RING * K)
        new_keys = keys_ptr + unit_offset(keys_columns_ptr, write, key_head, keys_stride, KEY_UNITS, RING * K)
        old_decays = decays_ptr + unit_offset(decays_columns_ptr, read, head, decays_stride, DECAY_UNITS, RING * D)
        new_decays = decays_ptr + unit_offset(decays_columns_ptr, write, head, decays_stride, DECAY_UNITS, RING * D)
        source = unit_offset(checkpoint_columns_ptr, read, head, checkpoint_stride, CHECKPOINT_UNITS, K * V)
        target = unit_offset(checkpoint_columns_ptr, write, head, checkpoint_stride, CHECKPOINT_UNITS, K * V)
        moves = source != target
        # Of `states`, which the step's sequences from `first_seq` on have.
        states = (seq - first_seq).to(tl.int64) * states_stride + head * K * V
        begin = end * 0
        is_passed = end > computed
        if PART == FROM_CHECKPOINT and end > computed:  # what made it is done
            start += end - computed
            computed, begin, source, moves = end, end, target, end < 0
        elif computed > 0:
            latest = computed // BLOCK * BLOCK
            earliest = tl.maximum(0, (computed - RING + BLOCK) // BLOCK * BLOCK)
            stored = tl.load(old_values + RING * V + block * BLOCK_C).to(tl.int32) // BLOCK * BLOCK
            begin = tl.minimum(tl.maximum(stored, earliest), latest)
        state = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
        is_stored = begin > 0
        if HAS_STATES:
            is_stored = is_stored & (is_passed == 0)
            if is_passed:
                state = tl.load(states_ptr + states + state_KC, mask=ok_KC, other=0.0)
                tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)
        if is_stored:
            state = tl.load(checkpoint_ptr + source + state_KC, mask=ok_KC, other=0.0).to(tl.float32)
            if moves and begin == end:
                tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)

        # The entries since the checkpoint. Those behind the new one are copied to other pages.
        copied_from = tl.where(moves, end, computed)
        for number in range(0, tl.cdiv(computed - begin, BLOCK)):
            position_B = begin + number * BLOCK + entries_B
            ok_B = position_B < computed
            entry_B = position_B % RING
            u_BC = tl.load(old_values + entry_B[:, None] * V + cols_C[None, :], mask=ok_B[:, None] & ok_C[None, :], other=0.0)
            k_KB = tl.load(old_keys + entry_B[None, :] * K + rows_K[:, None], mask=ok_K[:, None] & ok_B[None, :], other=0.0)
            is_copied_B = ok_B & (position_B >= copied_from)
            tl.store(new_values + entry_B[:, None] * V + cols_C[None, :], u_BC, mask=is_copied_B[:, None] & ok_C[None, :])
            if is_first and head % GROUP == 0:
                tl.store(new_keys + entry_B[None, :] * K + rows_K[:, None], k_KB, mask=ok_K[:, None] & is_copied_B[None, :])
            if PER_CHANNEL:
                decay_KB = tl.load(old_decays + entry_B[None, :] * K + rows_K[:, None], mask=ok_K[:, None] & ok_B[None, :], other=0.0)
                if is_first:
                    tl.store(new_decays + entry_B[None, :] * K + rows_K[:, None], decay_KB, mask=ok_K[:, None] & is_copied_B[None, :])
                total_K = tl.sum(decay_KB, axis=1)
                later_KB = total_K[:, None] - tl.cumsum(decay_KB, axis=1)
                state = state * tl.exp(total_K)[:, None]
                state += tl.dot(k_KB.to(tl.float32) * tl.exp(later_KB), u_BC, input_precision="ieee")
            else:
                decay_B = tl.load(old_decays + entry_B, mask=ok_B, other=0.0)
                if is_first:
                    tl.store(new_decays + entry_B, decay_B, mask=is_copied_B)
                total = tl.sum(decay_B, axis=0)
                later_B = total - tl.cumsum(decay_B, axis=0)
                state = state * tl.exp(total)
                state += tl.dot(k_KB.to(tl.float32) * tl.exp(later_B)[None, :], u_BC, input_precision="ieee")
            if begin + (number + 1) * BLOCK == end and end <= computed:
                tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)

        # The new tokens.
        if PART == TO_BEGIN:  # which has no output
            tl.store(states_ptr + states + state_KC, state, mask=ok_KC)
        else:
            for position in range(computed, end if PART == TO_CHECKPOINT else length):
                if position == end and position > computed:
                    tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)
                token = (start + position - computed).to(tl.int64)
                entry = position % RING
                k_raw_K = tl.load(k_ptr + token * k_stride + key_head * k_head_stride + rows_K, mask=ok_K, other=0.0)
                q_K = tl.load(q_ptr + token * q_stride + key_head * q_head_stride + rows_K, mask=ok_K, other=0.0).to(tl.float32)
                u_C = tl.load(v_ptr + token * v_stride + head * v_head_stride + cols_C, mask=ok_C, other=0.0).to(tl.float32)
                k_K = k_raw_K.to(tl.float32)
                if PER_CHANNEL:
                    decay_K = tl.load(decay_ptr + (token * NUM_HEADS + head) * K + rows_K, mask=ok_K, other=0.0)
                    state = state * tl.exp(decay_K)[:, None]
                    if is_first and position >= end:
                        tl.store(new_decays + entry * K + rows_K, decay_K, mask=ok_K)
                else:
                    decay = tl.load(decay_ptr + token * NUM_HEADS + head)
                    state = state * tl.exp(decay)
                    if is_first and position >= end:
                        tl.store(new_decays + entry, decay)
                if HAS_BETA:
                    u_C = tl.load(beta_ptr + token * NUM_HEADS + head) * (u_C - tl.sum(state * k_K[:, None], axis=0))
                state += k_K[:, None] * u_C[None, :]
                out_C = tl.sum(state * q_K[:, None], axis=0)
                tl.store(out_ptr + (token * NUM_HEADS + head) * V + cols_C, out_C.to(out_ptr.dtype.element_ty), mask=ok_C)
                if position >= end:
                    tl.store(new_values + entry * V + cols_C, u_C, mask=ok_C)
                    if is_first and head % GROUP == 0:
                        tl.store(new_keys + entry * K + rows_K, k_raw_K, mask=ok_K)
            if PART == TO_CHECKPOINT:
                tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)
            tl.store(new_values + RING * V + cols_C, tl.zeros((BLOCK_C,), tl.float32) + end.to(tl.float32), mask=ok_C)


@triton.jit
def _linear_attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr,
    checkpoint_ptr, checkpoint_columns_ptr, keys_ptr, keys_columns_ptr, values_ptr, values_columns_ptr, decays_ptr, decays_columns_ptr,
    start_loc_ptr, seq_lens_ptr, read_ptr, write_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    checkpoint_stride, keys_stride, values_stride, decays_stride, read_stride, write_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RING: tl.constexpr,
    CHECKPOINT_UNITS: tl.constexpr, KEY_UNITS: tl.constexpr, VALUE_UNITS: tl.constexpr, DECAY_UNITS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, HAS_BETA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One new token of each sequence. The state itself is not formed: with c the checkpoint, and entries and decays since then,

    S^T x = S_c^T (exp(sum) x) + sum_j (exp(sum after j) k_j . x) u_j        for x = q and x = k
    """
    block, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    D: tl.constexpr = K if PER_CHANNEL else 1
    length = tl.load(seq_lens_ptr + seq)
    token = tl.load(start_loc_ptr + seq).to(tl.int64)
    if (length > 0) & (tl.load(start_loc_ptr + seq + 1) > token):
        computed = length - 1
        end = computed // BLOCK * BLOCK
        key_head = head // GROUP
        read, write = read_ptr + seq * read_stride, write_ptr + seq * write_stride
        rows_K, cols_C, entries_B = tl.arange(0, BLOCK_K), block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK)
        ok_K, ok_C = rows_K < K, cols_C < V
        is_first = block == 0
        state_KC = rows_K[:, None] * V + cols_C[None, :]
        ok_KC = ok_K[:, None] & ok_C[None, :]
        old_values = values_ptr + unit_offset(values_columns_ptr, read, head, values_stride, VALUE_UNITS, (RING + 1) * V)
        new_values = values_ptr + unit_offset(values_columns_ptr, write, head, values_stride, VALUE_UNITS, (RING + 1) * V)
        old_keys = keys_ptr + unit_offset(keys_columns_ptr, read, key_head, keys_stride, KEY_UNITS, RING * K)
        new_keys = keys_ptr + unit_offset(keys_columns_ptr, write, key_head, keys_stride, KEY_UNITS, RING * K)
        old_decays = decays_ptr + unit_offset(decays_columns_ptr, read, head, decays_stride, DECAY_UNITS, RING * D)
        new_decays = decays_ptr + unit_offset(decays_columns_ptr, write, head, decays_stride, DECAY_UNITS, RING * D)
        source = unit_offset(checkpoint_columns_ptr, read, head, checkpoint_stride, CHECKPOINT_UNITS, K * V)
        target = unit_offset(checkpoint_columns_ptr, write, head, checkpoint_stride, CHECKPOINT_UNITS, K * V)
        moves = source != target
        earliest = tl.maximum(0, (computed - RING + BLOCK) // BLOCK * BLOCK)
        stored = tl.load(old_values + RING * V + block * BLOCK_C).to(tl.int32) // BLOCK * BLOCK
        begin = tl.where(computed > 0, tl.minimum(tl.maximum(stored, earliest), end), 0)
        state = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
        if begin > 0:
            state = tl.load(checkpoint_ptr + source + state_KC, mask=ok_KC, other=0.0).to(tl.float32)

        k_raw_K = tl.load(k_ptr + token * k_stride + key_head * k_head_stride + rows_K, mask=ok_K, other=0.0)
        k_K = k_raw_K.to(tl.float32)
        q_K = tl.load(q_ptr + token * q_stride + key_head * q_head_stride + rows_K, mask=ok_K, other=0.0).to(tl.float32)
        u_C = tl.load(v_ptr + token * v_stride + head * v_head_stride + cols_C, mask=ok_C, other=0.0).to(tl.float32)
        # What q and k meet: decayed to the block of entries that is looked at, from the last one backwards.
        if PER_CHANNEL:
            new_decay = tl.load(decay_ptr + (token * NUM_HEADS + head) * K + rows_K, mask=ok_K, other=0.0)
        else:
            new_decay = tl.load(decay_ptr + token * NUM_HEADS + head)
        total = new_decay
        from_q_C, from_k_C = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
        copied_from = tl.where(moves, end, computed)
        for back in range(0, tl.cdiv(computed - begin, BLOCK)):
            position_B = begin + (tl.cdiv(computed - begin, BLOCK) - 1 - back) * BLOCK + entries_B
            ok_B = position_B < computed
            entry_B = position_B % RING
            u_BC = tl.load(old_values + entry_B[:, None] * V + cols_C[None, :], mask=ok_B[:, None] & ok_C[None, :], other=0.0)
            k_raw_BK = tl.load(old_keys + entry_B[:, None] * K + rows_K[None, :], mask=ok_B[:, None] & ok_K[None, :], other=0.0)
            is_copied_B = ok_B & (position_B >= copied_from)
            tl.store(new_values + entry_B[:, None] * V + cols_C[None, :], u_BC, mask=is_copied_B[:, None] & ok_C[None, :])
            if is_first and head % GROUP == 0:
                tl.store(new_keys + entry_B[:, None] * K + rows_K[None, :], k_raw_BK, mask=is_copied_B[:, None] & ok_K[None, :])
            k_BK = k_raw_BK.to(tl.float32)
            if PER_CHANNEL:
                decay_BK = tl.load(old_decays + entry_B[:, None] * K + rows_K[None, :], mask=ok_B[:, None] & ok_K[None, :], other=0.0)
                if is_first:
                    tl.store(new_decays + entry_B[:, None] * K + rows_K[None, :], decay_BK, mask=is_copied_B[:, None] & ok_K[None, :])
                sum_K = tl.sum(decay_BK, axis=0)
                k_BK = k_BK * tl.exp(total[None, :] + sum_K[None, :] - tl.cumsum(decay_BK, axis=0))
                k_q_B = tl.sum(k_BK * q_K[None, :], axis=1)
                k_k_B = tl.sum(k_BK * k_K[None, :], axis=1)
                total += sum_K
            else:
                decay_B = tl.load(old_decays + entry_B, mask=ok_B, other=0.0)
                if is_first:
                    tl.store(new_decays + entry_B, decay_B, mask=is_copied_B)
                sum_decays = tl.sum(decay_B, axis=0)
                later_B = tl.exp(total + sum_decays - tl.cumsum(decay_B, axis=0))
                k_q_B = later_B * tl.sum(k_BK * q_K[None, :], axis=1)
                k_k_B = later_B * tl.sum(k_BK * k_K[None, :], axis=1)
                total += sum_decays
            from_q_C += tl.sum(k_q_B[:, None] * u_BC, axis=0)
            if HAS_BETA:
                from_k_C += tl.sum(k_k_B[:, None] * u_BC, axis=0)
        scale_K = tl.exp(total) + tl.zeros((BLOCK_K,), tl.float32)
        from_q_C += tl.sum(state * (scale_K * q_K)[:, None], axis=0)
        if HAS_BETA:
            from_k_C += tl.sum(state * (scale_K * k_K)[:, None], axis=0)
            u_C = tl.load(beta_ptr + token * NUM_HEADS + head) * (u_C - from_k_C)
        out_C = from_q_C + tl.sum(k_K * q_K, axis=0) * u_C
        tl.store(out_ptr + (token * NUM_HEADS + head) * V + cols_C, out_C.to(out_ptr.dtype.element_ty), mask=ok_C)

        # Once in 16 tokens the checkpoint moves: here the state is formed, entry by entry.
        for position in range(begin, end):
            entry = position % RING
            entry_k_K = tl.load(old_keys + entry * K + rows_K, mask=ok_K, other=0.0).to(tl.float32)
            entry_u_C = tl.load(old_values + entry * V + cols_C, mask=ok_C, other=0.0)
            if PER_CHANNEL:
                state = state * tl.exp(tl.load(old_decays + entry * K + rows_K, mask=ok_K, other=0.0))[:, None]
            else:
                state = state * tl.exp(tl.load(old_decays + entry))
            state += entry_k_K[:, None] * entry_u_C[None, :]
        if (end > begin) | (moves & (begin > 0)):
            tl.store(checkpoint_ptr + target + state_KC, state.to(checkpoint_ptr.dtype.element_ty), mask=ok_KC)

        entry = computed % RING
        tl.store(new_values + entry * V + cols_C, u_C, mask=ok_C)
        if is_first and head % GROUP == 0:
            tl.store(new_keys + entry * K + rows_K, k_raw_K, mask=ok_K)
        if is_first:
            if PER_CHANNEL:
                tl.store(new_decays + entry * K + rows_K, new_decay, mask=ok_K)
            else:
                tl.store(new_decays + entry, new_decay)
        tl.store(new_values + RING * V + cols_C, tl.zeros((BLOCK_C,), tl.float32) + end.to(tl.float32), mask=ok_C)


def linear_attention(operands: Operands) -> torch.Tensor:
    """`cas::linear_attention`. Padding is 0."""
    metadata = operands.metadata
    if metadata.max_query_len <= ROLLBACK_TOKENS + 1:
        out_THV = metadata.new_output(operands.v_THV, may_be_captured=True)
        if metadata.max_query_len == 1:
            _decode(operands, out_THV)
        else:
            _launch(ALL, operands, out_THV)
        return out_THV
    found = fla_prompts.linear_attention(operands, partial(_launch, TO_BEGIN, operands, None))
    if found is None:
        out_THV, states = metadata.new_output(operands.v_THV), None
        _launch(TO_CHECKPOINT, operands, out_THV)
    else:
        out_THV, states = found
    _launch(FROM_CHECKPOINT, operands, out_THV, states)
    return out_THV


def _decode(operands: Operands, out_THV: torch.Tensor) -> None:
    value_dim = operands.v_THV.shape[2]
    block = min(DECODE_COLUMNS, max(16, next_power_of_2(value_dim)))
    _launch_kernel(_linear_attention_decode_kernel, operands, (out_THV,), block, num_warps=DECODE_WARPS)


def _launch(part: tl.constexpr, operands: Operands, out_THV: torch.Tensor | None, states: States | None = None) -> None:
    block = min(32, max(16, next_power_of_2(operands.v_THV.shape[2])))
    given = (None, 0, 0) if states is None else (states.states_RHKV, states.states_RHKV.stride(0), states.first_seq)
    _launch_kernel(_linear_attention_kernel, operands, (out_THV, *given), block, PART=part.value, num_warps=4)


def _launch_kernel(kernel: Any, operands: Operands, outputs: Sequence[torch.Tensor | int | None], block: int, **options: Any) -> None:
    q_TGK, k_TGK, v_THV, log_decay, beta_TH, state, metadata = operands
    num_heads, value_dim = v_THV.shape[1:]
    num_key_heads, key_dim = k_TGK.shape[1:]
    checkpoint, keys, values, decays = (tensor for tensor, _ in state)
    launch(
        kernel,
        (cdiv(value_dim, block), num_heads, len(metadata.seq_lens)),
        q_TGK,
        k_TGK,
        v_THV,
        log_decay,
        beta_TH,
        *outputs,
        *(tensor for pair in state for tensor in pair),
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.read_pages,
        metadata.write_pages,
        *(stride for x in (q_TGK, k_TGK, v_THV) for stride in x.stride()[:2]),
        *(tensor.stride(0) for tensor, _ in state),
        metadata.read_pages.stride(0),
        metadata.write_pages.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_key_heads,
        K=key_dim,
        V=value_dim,
        RING=keys.shape[2],
        CHECKPOINT_UNITS=checkpoint.shape[1],
        KEY_UNITS=keys.shape[1],
        VALUE_UNITS=values.shape[1],
        DECAY_UNITS=decays.shape[1],
        PER_CHANNEL=log_decay.dim() == 3,
        HAS_BETA=beta_TH is not None,
        BLOCK_K=max(16, next_power_of_2(key_dim)),
        BLOCK_C=block,
        **options,
    )

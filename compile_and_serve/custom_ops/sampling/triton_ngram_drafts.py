"""The Triton kernels behind `ngram_drafts`. Shape legend: see there; B tokens of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv

_BLOCK = 2048  # positions per program
_ROWS = 128  # tokens to append per program


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kernel(
    history_ptr, slots_ptr, sequences_ptr, rows_ptr, starts_ptr, lengths_ptr, tokens_ptr, num_tokens, width, ROWS: tl.constexpr
):
    index_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok_T = index_T < num_tokens
    slot_T = tl.load(slots_ptr + index_T, mask=ok_T, other=0)
    row_T = tl.load(rows_ptr + index_T, mask=ok_T, other=0)
    sequence_T = tl.load(sequences_ptr + index_T, mask=ok_T, other=0)
    behind_T = tl.load(starts_ptr + sequence_T + 1, mask=ok_T, other=0) - row_T  # tokens from this one to the sequence's last
    place_T = tl.load(lengths_ptr + sequence_T, mask=ok_T, other=0) - behind_T
    token_T = tl.load(tokens_ptr + index_T, mask=ok_T, other=0)
    tl.store(history_ptr + slot_T * width + place_T + 1, token_T.to(tl.int32), mask=ok_T)


@triton.jit
def _match_kernel(history_ptr, slots_ptr, lengths_ptr, best_ptr, width, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr):
    seq = tl.program_id(0)
    begin = tl.program_id(1) * BLOCK
    length = tl.load(lengths_ptr + seq)
    if begin < length:
        row_ptr = history_ptr + tl.load(slots_ptr + seq) * width
        ends_B = begin + tl.arange(0, BLOCK)
        is_equal_B = ends_B < length  # a token follows
        match_len_B = tl.zeros((BLOCK,), tl.int64)
        for n in tl.static_range(1, LONGEST + 1):
            last = tl.load(row_ptr + tl.maximum(length - n, 0))
            before_B = tl.load(row_ptr + ends_B - n, mask=is_equal_B & (ends_B >= n), other=-2)
            is_equal_B = is_equal_B & (before_B == last)
            match_len_B += is_equal_B.to(tl.int64)
        keys_B = tl.where(match_len_B >= SHORTEST, match_len_B * width + ends_B, 0)
        best = tl.max(keys_B, axis=0)
        if best > 0:
            tl.atomic_max(best_ptr + seq, best)


@triton.jit
def _draft_kernel(
    history_ptr,
    slots_ptr,
    lengths_ptr,
    counts_ptr,
    best_ptr,
    drafts_ptr,
    width,
    NUM_DRAFTS: tl.constexpr,
    REPEATS: tl.constexpr,
    PLACES: tl.constexpr,
):
    seq = tl.program_id(0)
    slot = tl.load(slots_ptr + seq)
    length = tl.load(lengths_ptr + seq)
    match = tl.load(best_ptr + seq) % width
    if REPEATS:
        match = tl.where((match == 0) & (length > 0), length - 1, match)
    places_K = tl.arange(0, PLACES)
    period = tl.maximum(length - match, 1)
    is_draft_K = places_K < tl.where(match > 0, tl.load(counts_ptr + seq), 0)
    tokens_K = tl.load(history_ptr + slot * width + match + places_K % period, mask=is_draft_K, other=-1)
    tl.store(drafts_ptr + slot * NUM_DRAFTS + places_K, tokens_K.to(tl.int64), mask=places_K < NUM_DRAFTS)


def append_tokens(
    history_RW: torch.Tensor,
    slots_L: torch.Tensor,
    sequences_L: torch.Tensor,
    rows_L: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens_L: torch.Tensor,
) -> None:
    """int32: query_start_loc, seq_lens. See `ngram_drafts.append_tokens`."""
    num_tokens = tokens_L.shape[0]
    launch(
        _append_kernel,
        (cdiv(num_tokens, _ROWS),),
        history_RW,
        slots_L,
        sequences_L,
        rows_L,
        query_start_loc,
        seq_lens,
        tokens_L,
        num_tokens,
        history_RW.shape[1],
        ROWS=_ROWS,
        num_warps=4,
    )


def find_drafts(
    history_RW: torch.Tensor,
    slots_S: torch.Tensor,
    lengths_S: torch.Tensor,
    counts_S: torch.Tensor,
    drafts_RK: torch.Tensor,
    shortest: int,
    longest: int,
    *,
    repeats: bool,
) -> None:
    """See `ngram_drafts.find_drafts`."""
    (num_seqs,), width, num_drafts = slots_S.shape, history_RW.shape[1], drafts_RK.shape[1]
    best_S = torch.zeros_like(slots_S)  # length of the match · W + the position behind it
    launch(
        _match_kernel,
        (num_seqs, cdiv(width, _BLOCK)),
        history_RW,
        slots_S,
        lengths_S,
        best_S,
        width,
        SHORTEST=shortest,
        LONGEST=longest,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    launch(
        _draft_kernel,
        (num_seqs,),
        history_RW,
        slots_S,
        lengths_S,
        counts_S,
        best_S,
        drafts_RK,
        width,
        NUM_DRAFTS=num_drafts,
        REPEATS=repeats,
        PLACES=triton.next_power_of_2(num_drafts),
        num_warps=1,
    )

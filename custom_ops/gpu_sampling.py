"""Sampling on the device without a host synchronization, so that it can end a captured decode step.

Shape legend: S sequences, V vocabulary, J chunks of a row.

A row with temperature 0 takes its largest logit (lowest id among equals). Any other row takes argmax(logit / temperature + Gumbel
noise) over the tokens that its filters keep, which is a draw from the softmax of those. The noise depends on the row's seed, its
position and the token id alone: not on the batch, not on the row's place in it.
Filters act as in the usual order: top-k, then top-p over what is left, and min-p; each keeps all logits that equal its threshold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from custom_ops.triton_common import split_counters

_CHUNK = 8192


@triton.jit
def _ordered_key(x):
    """uint32 keys in the order of float32 values."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _from_ordered_key(key):
    return tl.where(key >> 31 == 1, key ^ 0x80000000, ~key).to(tl.float32, bitcast=True)


@triton.jit
def _threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, vocab, row_stride,
    BLOCK: tl.constexpr, KEY_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    use_k = (top_k > 0) & (top_k < vocab)
    if (temperature <= 0.0) | ((top_p >= 1.0) & (min_p <= 0.0) & (use_k == 0)):
        tl.store(threshold_ptr + row, float("-inf"))
        return
    cols = tl.arange(0, BLOCK)
    base = logits_ptr + row * row_stride
    lanes = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(base + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32)
        lanes = tl.maximum(lanes, x)
    largest = tl.max(lanes, 0)
    threshold = float("-inf")
    if min_p > 0.0:
        threshold = largest + temperature * tl.log(min_p)
    if use_k:
        # The largest key that at least k logits reach, found bit by bit from the top.
        key = tl.zeros((1,), dtype=tl.uint32)
        for bit in range(KEY_BITS):
            candidate = key | (tl.full((1,), 1, dtype=tl.uint32) << (31 - bit))
            counts = tl.zeros((BLOCK,), dtype=tl.int32)
            for start in range(0, vocab, BLOCK):
                ok = start + cols < vocab
                x = tl.load(base + start + cols, mask=ok, other=float("-inf")).to(tl.float32)
                counts += ((_ordered_key(x) >= candidate) & ok).to(tl.int32)
            key = tl.where(tl.sum(counts, 0) >= top_k, candidate, key)
        threshold = tl.maximum(threshold, tl.max(_from_ordered_key(key), 0))
    if top_p < 1.0:
        kept = threshold if use_k else float("-inf")
        masses = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(base + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32)
            masses += tl.where(x >= kept, tl.exp((x - largest) / temperature), 0.0)
        target = top_p * tl.sum(masses, 0)
        key = tl.zeros((1,), dtype=tl.uint32)
        for bit in range(KEY_BITS):
            candidate = key | (tl.full((1,), 1, dtype=tl.uint32) << (31 - bit))
            masses = tl.zeros((BLOCK,), dtype=tl.float32)
            for start in range(0, vocab, BLOCK):
                x = tl.load(base + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32)
                keep = (x >= kept) & (_ordered_key(x) >= candidate)
                masses += tl.where(keep, tl.exp((x - largest) / temperature), 0.0)
            key = tl.where(tl.sum(masses, 0) >= target, candidate, key)
        # Never above the largest logit: rounding of the sums must not leave a row without a token.
        threshold = tl.maximum(threshold, tl.minimum(tl.max(_from_ordered_key(key), 0), largest))
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _choose_kernel(
    logits_ptr, temperature_ptr, threshold_ptr, seed_ptr, position_ptr, best_ptr, best_id_ptr, counter_ptr, out_ptr, out_best_ptr,
    vocab, row_stride, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_J: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    num_nan = tl.sum((x != x).to(tl.int32), 0)  # before the filters: a comparison with NaN would drop it
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            threshold = tl.load(threshold_ptr + row)
            # One stream of noise a (seed, position); 2⁻³³ keeps the logarithm finite.
            stream = tl.load(seed_ptr + row) * 0x9E3779B1 + tl.load(position_ptr + row)
            uniform = tl.rand(stream, ids) + 1.1641532e-10
            noisy = x / temperature - tl.log(-tl.log(uniform))
            x = tl.where((x >= threshold) & (ids < vocab), noisy, float("-inf"))
    best = tl.max(x, 0)
    # A row with a NaN anywhere says so in its largest value; its token means nothing.
    if num_nan > 0:
        best = float("nan")
    best_id = tl.min(tl.where((x == best) & (ids < vocab), ids, 0x7FFFFFFF), 0)
    if CHUNKS == 1:
        tl.store(out_ptr + row, tl.where(best_id < vocab, best_id, 0).to(tl.int64))
        tl.store(out_best_ptr + row, best)
    else:
        tl.store(best_ptr + row * CHUNKS + chunk, best)
        tl.store(best_id_ptr + row * CHUNKS + chunk, best_id)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
            chunks_J = tl.arange(0, BLOCK_J)
            ok_J = chunks_J < CHUNKS
            best_J = tl.load(best_ptr + row * CHUNKS + chunks_J, mask=ok_J, other=float("-inf"), cache_modifier=".cg")
            id_J = tl.load(best_id_ptr + row * CHUNKS + chunks_J, mask=ok_J, other=0x7FFFFFFF, cache_modifier=".cg")
            largest = tl.max(best_J, 0)
            winner = tl.min(tl.where(best_J == largest, id_J, 0x7FFFFFFF), 0)
            if tl.max((best_J != best_J).to(tl.int32), 0) > 0:
                largest = float("nan")
            # Without a largest logit, token 0 keeps the step of the other rows going.
            tl.store(out_best_ptr + row, largest)
            tl.store(out_ptr + row, tl.where(winner < vocab, winner, 0).to(tl.int64))
            tl.store(counter_ptr + row, 0)


def greedy_tokens(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The id of each row's largest logit, the lowest among equals, and that logit (NaN where the row has one).

    logits_SV: [S, V], rows may be strided. → int64 [S], float32 [S]
    """
    return _choose(logits_SV, None, None, None, None)


def sample_tokens(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row from softmax(logits / temperature) after top-k, top-p and min-p; temperature 0 is greedy.

    logits_SV: [S, V], float32, float16 or bfloat16, penalties already applied; temperature_S, top_p_S (1: off), min_p_S (0: off):
    float32 [S]; top_k_S: int32 [S], 0: off; seed_S, position_S: int64 [S].
    → int64 [S], and float32 [S]: the winning score, NaN where the row has a NaN, -inf where no token is left
    """
    num_seqs, vocab = logits_SV.shape
    threshold_S = torch.empty(num_seqs, dtype=torch.float32, device=logits_SV.device)
    if num_seqs:
        _threshold_kernel[(num_seqs,)](
            logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, threshold_S, vocab, logits_SV.stride(0),
            BLOCK=min(_CHUNK, triton.next_power_of_2(vocab)), KEY_BITS=16 if logits_SV.dtype == torch.bfloat16 else 32, num_warps=16,
        )  # fmt: skip
    return _choose(logits_SV, temperature_S, threshold_S, seed_S, position_S)


def _choose(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor | None,
    threshold_S: torch.Tensor | None,
    seed_S: torch.Tensor | None,
    position_S: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_seqs, vocab = logits_SV.shape
    device = logits_SV.device
    out_S = torch.empty(num_seqs, dtype=torch.int64, device=device)
    out_best_S = torch.empty(num_seqs, dtype=torch.float32, device=device)
    if num_seqs == 0:
        return out_S, out_best_S
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, chunk)
    best = torch.empty(num_seqs * chunks, dtype=torch.float32, device=device)
    best_id = torch.empty(num_seqs * chunks, dtype=torch.int32, device=device)
    _choose_kernel[(num_seqs, chunks)](
        logits_SV, temperature_S, threshold_S, seed_S, position_S, best, best_id, split_counters(device), out_S, out_best_S,
        vocab, logits_SV.stride(0), CHUNK=chunk, CHUNKS=chunks, BLOCK_J=triton.next_power_of_2(chunks),
        GREEDY=temperature_S is None, num_warps=8,
    )  # fmt: skip
    return out_S, out_best_S

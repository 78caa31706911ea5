"""Samples tokens on the device without host synchronization and without sorting, so that a CUDA graph of a step can contain it.

Shape legend: S sequences, V vocabulary, J chunks of a row, B blocks of a chunk, C candidates, D digits of a key.

A row with temperature 0 takes its largest logit, the lowest id among equal ones. Any other row takes argmax(logit / temperature + Gumbel
noise) over the tokens that its filters keep, which is a draw from their softmax. The noise depends on the row's seed, its position and
the token id, not on the batch or the row's index in it.
Filters apply in the usual order: min-p and top-k, then top-p over the rest. Each keeps all logits that equal its threshold.

Thresholds are not searched over the whole vocabulary where that can be avoided:
- small top-k: the k-th largest of the maxima of the row's blocks is a lower bound of the k-th largest logit. The few logits above the
  bound are gathered, and the filters and the draw use only them;
- otherwise the winner of the whole row is drawn first and then checked. It is allowed if fewer than k logits, and less than top-p of the
  mass, are above it. If it is not allowed, no token at or below it is, and the winner among the tokens above it is checked next. The
  result is the argmax over the allowed tokens, after 1 + ln(1 / their mass) rounds on average.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    split_counters,
    supports_pdl,
    wait_for_previous,
)

_CHUNK, _STEP, _BLOCK = 8192, 2048, 128
_CANDIDATES = 1024
_MAX_GATHERED_K = 256  # a larger top-k is checked, not gathered


@triton.jit
def _ordered_key(x):
    """uint32 keys in the order of float32 values."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_ordered_key(key):
    return tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def gumbel_noisy(x, ids, temperature, seed, position):
    """x / temperature + Gumbel noise, one random stream per (seed, position). 2⁻³³ keeps the logarithm finite."""
    uniform = tl.rand(seed * 0x9E3779B1 + position, ids) + 1.1641532e-10
    return x / temperature - tl.log(-tl.log(uniform))


@triton.jit
def _kth_largest(x, k, KEY_BITS: tl.constexpr):
    """The k-th largest value of a tensor, found bit by bit from the top; -inf where it has fewer values."""
    keys = _ordered_key(x)
    key = tl.full((1,), 0, dtype=tl.uint32)
    for bit in range(KEY_BITS):
        candidate = key | (tl.full((1,), 1, dtype=tl.uint32) << (31 - bit))
        key = tl.where(tl.sum((keys >= candidate).to(tl.int32), 0) >= k, candidate, key)
    kth = tl.max(_from_ordered_key(key), 0)
    return tl.where(kth == kth, kth, float("-inf"))  # key 0 is NaN


@triton.jit
def _first_of_largest(scores, ids):
    """(the largest score, the lowest id with it)."""
    largest = tl.max(scores, 0)
    return largest, tl.min(tl.where(scores == largest, ids, 0x7FFFFFFF), 0)


@triton.jit
def _mass(x, largest, temperature):
    """exp((x - largest) / temperature) in fixed point, whose sums do not depend on their order."""
    return (tl.exp((x - largest) / temperature) * 1073741824.0).to(tl.int64)


@triton.jit
def _merge_best(x, start, best, best_start):
    """For each lane, the largest value so far and the step that it came in, the first of equal ones. NaN is the largest."""
    best_start = tl.where(x > best, start, best_start)
    return tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL), best_start


@triton.jit
def _rank(x, ids):
    """uint64 key that orders by value, then by descending id (below 2³¹). NaN is the largest."""
    key = _ordered_key(tl.where(x == 0.0, 0.0, x))  # 0 equals -0
    key = tl.where(x == x, key, tl.full(x.shape, 0xFFFFFFFF, dtype=tl.uint32))
    return (key.to(tl.uint64) << 32) | (0x7FFFFFFF - ids).to(tl.uint64)


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    seed_ptr,
    position_ptr,
    rank_ptr,
    block_max_ptr,
    counter_ptr,
    out_ptr,
    out_best_ptr,
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
    GREEDY: tl.constexpr,
    GATHERED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The winner of every row over the whole vocabulary, and the maxima of the blocks of rows whose candidates will be gathered.

    A program keeps one maximum per lane and reduces once. The last program of a row reduces the results of all.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = logits_ptr + row * row_stride
    cols = tl.arange(0, STEP)
    best = tl.full((STEP,), float("-inf"), dtype=tl.float32)
    best_start = tl.full((STEP,), 0x40000000, dtype=tl.int32)  # above any token id
    is_drawn = False
    let_next_start(PDL)
    wait_for_previous(PDL)
    if not GREEDY:
        temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
        is_gathered = (temperature > 0.0) & (top_k > 0) & (top_k <= GATHERED_K)
        is_drawn = (temperature > 0.0) & (is_gathered == 0)
    if is_drawn:
        if not GREEDY:
            seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
            for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, STEP):  # a loop, because the noise is much code per element
                ids = start + cols
                x = tl.load(base + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
                noisy = tl.where(ids < vocab, gumbel_noisy(x, ids, temperature, seed, position), float("-inf"))
                best, best_start = _merge_best(noisy, start, best, best_start)
    else:
        for step in tl.static_range(CHUNK // STEP):  # unrolled, so that all loads are in flight at once
            start = chunk * CHUNK + step * STEP
            x = tl.load(base + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32)
            if not GREEDY:
                if is_gathered:
                    max_B = tl.max(tl.reshape(x, (STEP // BLOCK, BLOCK)), 1)
                    first_block = ((row * CHUNKS + chunk) * CHUNK + step * STEP) // BLOCK
                    tl.store(block_max_ptr + first_block + tl.arange(0, STEP // BLOCK), max_B)
            best, best_start = _merge_best(x, start, best, best_start)
    rank = tl.max(_rank(best, best_start + cols), 0)
    is_last = True
    if CHUNKS > 1:
        tl.store(rank_ptr + row * CHUNKS + chunk, rank)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1
        if is_last:
            chunks_J = tl.arange(0, BLOCK_J)
            rank_J = tl.load(rank_ptr + row * CHUNKS + chunks_J, mask=chunks_J < CHUNKS, other=0, cache_modifier=".cg")
            rank = tl.max(rank_J, 0)
            tl.store(counter_ptr + row, 0)
    if is_last:
        winner = 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int64)
        # A NaN anywhere in a row becomes its largest value. Token 0 replaces a winner that does not exist, so that the step goes on.
        tl.store(out_best_ptr + row, _from_ordered_key((rank >> 32).to(tl.uint32)))
        tl.store(out_ptr + row, tl.where(winner < vocab, winner, 0))


@triton.jit
def _choose_among(x_C, id_C, top_k, top_p, min_p, temperature, seed, position, KEY_BITS: tl.constexpr):
    """The token of a row whose candidates are all in x_C; unused elements are -inf."""
    largest = tl.max(x_C, 0)
    floor = tl.maximum(_kth_largest(x_C, top_k, KEY_BITS), largest + temperature * tl.log(min_p))
    kept_C = (x_C >= floor) & (x_C > float("-inf"))
    mass_C = tl.where(kept_C, _mass(x_C, largest, temperature), 0)
    limit = tl.sum(mass_C, 0).to(tl.float32) * top_p
    noisy_C = tl.where(kept_C, gumbel_noisy(x_C, id_C, temperature, seed, position), float("-inf"))
    _, token = _first_of_largest(noisy_C, id_C)
    searching = top_p < 1.0
    while searching:
        pivot = tl.max(tl.where(id_C == token, x_C, float("-inf")), 0)
        above_C = kept_C & (x_C > pivot)
        mass = tl.sum(tl.where(above_C, mass_C, 0), 0)
        searching = (mass > 0) & (mass.to(tl.float32) >= limit)
        if searching:
            _, token = _first_of_largest(tl.where(above_C, noisy_C, float("-inf")), id_C)
    return token


@triton.jit
def _choose_checked(base, token, top_k, top_p, min_p, temperature, seed, position, vocab, BLOCK: tl.constexpr, KEY_BITS: tl.constexpr):
    """The token of a row, by checking winners against the whole row. token: the first winner; -1: none yet."""
    cols = tl.arange(0, BLOCK)
    lanes = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        lanes = tl.maximum(lanes, tl.load(base + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32))
    largest = tl.max(lanes, 0)
    floor = largest + temperature * tl.log(min_p)
    if (top_k > 0) & (top_k < vocab):
        # The k-th largest key, digit by digit from the top. rank: among the keys that begin with the digits found so far.
        digits_D = tl.arange(0, 256)
        key, rank = tl.full((1,), 0, dtype=tl.uint32), top_k
        for shift in range(24, 24 - KEY_BITS, -8):
            counts_D = tl.zeros((256,), dtype=tl.int32)
            for start in range(0, vocab, BLOCK):
                ok = start + cols < vocab
                keys = _ordered_key(tl.load(base + start + cols, mask=ok, other=float("-inf")).to(tl.float32)) >> shift
                has_digits = ok & (keys >> 8 == (key >> shift) >> 8)
                counts_D += tl.histogram((keys & 255).to(tl.int32), 256, mask=has_digits)
            at_least_D = tl.sum(counts_D, 0) - tl.cumsum(counts_D, 0) + counts_D
            digit = tl.max(tl.where(at_least_D >= rank, digits_D, 0), 0)
            rank -= tl.sum(tl.where(digits_D > digit, counts_D, 0), 0)
            key |= digit.to(tl.uint32) << shift
        floor = tl.maximum(floor, tl.max(_from_ordered_key(key), 0))
    limit = 0.0
    if top_p < 1.0:
        masses = tl.zeros((BLOCK,), dtype=tl.int64)
        for start in range(0, vocab, BLOCK):
            x = tl.load(base + start + cols, mask=start + cols < vocab, other=float("-inf")).to(tl.float32)
            masses += tl.where(x >= floor, _mass(x, largest, temperature), 0)
        limit = tl.sum(masses, 0).to(tl.float32) * top_p
    pivot = tl.load(base + token, mask=token >= 0, other=float("-inf")).to(tl.float32)
    allowed = (token >= 0) & (pivot >= floor)
    searching = temperature > 0.0
    while searching:
        # The mass above the winner, and the winner among the tokens above it.
        masses = tl.zeros((BLOCK,), dtype=tl.int64)
        next_score, next_token = float("-inf"), token
        for start in range(0, vocab, BLOCK):
            ids = start + cols
            x = tl.load(base + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            above = (x > pivot) & (x >= floor)
            if tl.max(above.to(tl.int32), 0) > 0:
                masses += tl.where(above, _mass(x, largest, temperature), 0)
                noisy = tl.where(above, gumbel_noisy(x, ids, temperature, seed, position), float("-inf"))
                block_score, block_token = _first_of_largest(noisy, ids)
                next_token = tl.where(block_score > next_score, block_token, next_token)
                next_score = tl.maximum(block_score, next_score)
        mass = tl.sum(masses, 0)
        is_over = (top_p < 1.0) & (mass > 0) & (mass.to(tl.float32) >= limit)
        searching = (next_score > float("-inf")) & (is_over | (allowed == 0))
        if searching:
            token = next_token
            allowed = next_score > float("-inf")
            pivot = tl.load(base + token).to(tl.float32)
    return token


@triton.jit(do_not_specialize=["num_seqs"])
def _filter_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, block_max_ptr, gathered_ptr,
    gathered_id_ptr, counter_ptr, out_ptr, out_best_ptr, vocab, row_stride, num_seqs,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr, KEY_BITS: tl.constexpr, GATHERED_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Corrects the tokens of rows with filters. Other rows keep `_draw_kernel`'s."""
    row, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    let_next_start(PDL)
    wait_for_previous(PDL)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    best = tl.load(out_best_ptr + row)
    is_finite = (best == best) & (tl.abs(best) < float("inf"))
    if (temperature <= 0.0) | (is_finite == 0) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0)):
        return
    base = logits_ptr + row * row_stride
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    start_token = tl.load(out_ptr + row).to(tl.int32)
    is_checked = program == 0
    if (top_k > 0) & (top_k <= GATHERED_K):
        blocks_B = tl.arange(0, BLOCKS)
        max_B = tl.load(
            block_max_ptr + row * (CHUNKS * (CHUNK // BLOCK)) + blocks_B, mask=blocks_B < CHUNKS * (CHUNK // BLOCK), other=float("-inf")
        )
        bound = _kth_largest(max_B, top_k, KEY_BITS)
        for chunk in range(program, CHUNKS, programs):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(base + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            reaches = (x >= bound) & (x > float("-inf"))
            wanted = reaches.to(tl.int32)
            at = tl.cumsum(wanted, 0) - wanted + tl.atomic_add(counter_ptr + num_seqs + row, tl.sum(wanted, 0))
            place = row * CANDIDATES + at
            tl.store(gathered_ptr + place, x, mask=reaches & (at < CANDIDATES))
            tl.store(gathered_id_ptr + place, ids, mask=reaches & (at < CANDIDATES))
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + 2 * num_seqs + row, 1, sem="acq_rel", scope="gpu") == programs - 1
        is_checked = program < 0
        if is_last:
            count = tl.atomic_add(counter_ptr + num_seqs + row, 0)
            tl.store(counter_ptr + num_seqs + row, 0)
            tl.store(counter_ptr + 2 * num_seqs + row, 0)
            is_checked = count > CANDIDATES  # many equal logits
            start_token = count * 0 - 1
            if count <= CANDIDATES:
                places_C = tl.arange(0, CANDIDATES)
                from_C = row * CANDIDATES + places_C
                x_C = tl.load(gathered_ptr + from_C, mask=places_C < count, other=float("-inf"), cache_modifier=".cg")
                id_C = tl.load(gathered_id_ptr + from_C, mask=places_C < count, other=0x7FFFFFFF, cache_modifier=".cg")
                token = _choose_among(x_C, id_C, top_k, top_p, min_p, temperature, seed, position, KEY_BITS)
                tl.store(out_ptr + row, token.to(tl.int64))
    if is_checked:
        checked = _choose_checked(base, start_token, top_k, top_p, min_p, temperature, seed, position, vocab, STEP, KEY_BITS)
        tl.store(out_ptr + row, checked.to(tl.int64))


def greedy_tokens(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The id of each row's largest logit, the lowest id among equal ones, and that logit (NaN where the row has a NaN).

    logits_SV: [S, V], rows may be strided. → int64 [S], float32 [S]
    """
    return _draw(logits_SV, None, None, None, None, None)


def sample_tokens(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row from softmax(logits / temperature) after top-k, min-p and top-p. Temperature 0 is greedy.

    logits_SV: [S, V], float32, float16 or bfloat16, after penalties; temperature_S, top_p_S (1: off), min_p_S (0: off):
    float32 [S]; top_k_S: int32 [S], 0: off; seed_S, position_S: int64 [S].
    → int64 [S], and float32 [S]: a score of the row, NaN where the row has a NaN, -inf where no token is left
    """
    num_seqs, vocab = logits_SV.shape
    chunk, chunks = _chunks(vocab)
    device = logits_SV.device
    block_max = torch.empty(num_seqs * chunks * (chunk // _BLOCK), dtype=torch.float32, device=device)
    tokens_S, best_S = _draw(logits_SV, temperature_S, top_k_S, seed_S, position_S, block_max)
    if num_seqs:
        # Every program takes a multiprocessor's registers, also for a row without filters. So with many rows each row gets few programs.
        programs = max(1, min(chunks, num_sms(device) // num_seqs))
        pdl = supports_pdl(device)
        launch(
            _filter_kernel, (num_seqs, programs),
            logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, seed_S, position_S, block_max,
            torch.empty(num_seqs * _CANDIDATES, dtype=torch.float32, device=device),
            torch.empty(num_seqs * _CANDIDATES, dtype=torch.int32, device=device), split_counters(device), tokens_S, best_S,
            vocab, logits_SV.stride(0), num_seqs, CHUNK=chunk, CHUNKS=chunks, STEP=min(chunk, _STEP), BLOCK=_BLOCK,
            BLOCKS=next_power_of_2(chunks * (chunk // _BLOCK)), CANDIDATES=_CANDIDATES,
            KEY_BITS=16 if logits_SV.dtype == torch.bfloat16 else 32, GATHERED_K=_MAX_GATHERED_K,
            PDL=pdl, num_warps=8, **launch_options(pdl),
        )  # fmt: skip
    return tokens_S, best_S


def _chunks(vocab: int) -> tuple[int, int]:
    """(logits per program, programs per row)"""
    chunk = max(_BLOCK, min(_CHUNK, next_power_of_2(vocab)))
    return chunk, cdiv(vocab, chunk)


def _draw(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor | None,
    top_k_S: torch.Tensor | None,
    seed_S: torch.Tensor | None,
    position_S: torch.Tensor | None,
    block_max: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_seqs, vocab = logits_SV.shape
    device = logits_SV.device
    out_S = torch.empty(num_seqs, dtype=torch.int64, device=device)
    out_best_S = torch.empty(num_seqs, dtype=torch.float32, device=device)
    if num_seqs == 0:
        return out_S, out_best_S
    chunk, chunks = _chunks(vocab)
    ranks = torch.empty(num_seqs * chunks, dtype=torch.uint64, device=device)
    pdl = supports_pdl(device)
    launch(
        _draw_kernel,
        (num_seqs, chunks),
        logits_SV,
        temperature_S,
        top_k_S,
        seed_S,
        position_S,
        ranks,
        block_max,
        split_counters(device),
        out_S,
        out_best_S,
        vocab,
        logits_SV.stride(0),
        CHUNK=chunk,
        CHUNKS=chunks,
        STEP=min(chunk, _STEP),
        BLOCK=_BLOCK,
        BLOCK_J=next_power_of_2(chunks),
        GREEDY=temperature_S is None,
        GATHERED_K=_MAX_GATHERED_K,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
    return out_S, out_best_S

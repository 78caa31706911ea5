"""Choose tokens from logits without waiting for the device.

Shape legend: R rows (one for each request that samples), V vocabulary, K candidates of a row, B blocks of the vocabulary,
v tokens of a block.

A random row inverts the cumulative distribution at one uniform number. That number depends only on (seed, output
position), so a request draws the same tokens alone, in a batch, and again after a preemption. Sums are in float64, so
that cumulative sums are monotonic and a token of weight 0 is never chosen.

min_p, top_k and top_p keep all tokens that equal their threshold, as the kernels in `custom_ops/sampling` do. So equal
logits are equally likely, whatever their ids are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of

# The step's arrays from which the GPU samples, one element per row; temperature 0 is greedy.
SAMPLING_FIELDS: dict[str, type[np.generic]] = {
    "temperatures": np.float32,
    "top_ks": np.int32,
    "top_ps": np.float32,
    "min_ps": np.float32,
    "seeds": np.int64,
    "sample_positions": np.int64,
}

GREEDY_CHUNK_ROWS = 16  # rows converted to float32 at a time on the CPU, so that the copy stays in the cache
VOCAB_BLOCK = 128
MAX_SORTED = 2048  # up to this number, candidates of top_p are sorted directly

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Keeps the threshold below the total even for the largest uniform number.
_BELOW_ONE = 1.0 - 2.0**-40
_LOG2_E = 1.4426950408889634  # for exp2, which is faster than exp on CPUs, above all where masks have set many -inf


def mix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014) of a uint64 array."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def stream_key(seed: int) -> int:
    """The uint64 key of the random stream of `seed`, which is any Python integer."""
    return int(mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GAMMA)[0])


def uniforms(keys_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """Element `position` of each key's stream: float32 in [0, 1), multiples of 2^-24.

    keys_R: uint64 [R] from `stream_key`; positions_R: int64 [R], number of tokens that the request has generated before.
    """
    counters = keys_R + (positions_R.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (mix64(counters) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def argmax_rows(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy choice → tokens int64 [R] and their logits [R], which are not finite if the row's logits are unusable.

    On the CPU this uses numpy, whose float32 argmax is vectorized; torch's is 10 to 20 times slower.
    """
    if not platform_of(logits_RV.device).shares_host_memory:
        from compile_and_serve.custom_ops.sampling.triton_sampling import greedy_tokens

        return greedy_tokens(logits_RV)
    num_rows = logits_RV.shape[0]
    tokens = np.empty(num_rows, dtype=np.int64)
    values = np.empty(num_rows, dtype=np.float32)
    for start in range(0, num_rows, GREEDY_CHUNK_ROWS):
        chunk = logits_RV[start : start + GREEDY_CHUNK_ROWS].float().numpy()
        best = chunk.argmax(axis=1)
        tokens[start : start + GREEDY_CHUNK_ROWS] = best
        values[start : start + GREEDY_CHUNK_ROWS] = chunk[np.arange(len(best)), best]
    return torch.from_numpy(tokens), torch.from_numpy(values)


def sample_rows(logits_SV: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row on the GPU → tokens int64 [S] and scores [S], as `argmax_rows`.

    logits_SV: any floating dtype. inputs: the arrays of `SAMPLING_FIELDS`, in that order.
    """
    from compile_and_serve.custom_ops.sampling.triton_sampling import sample_tokens

    return sample_tokens(logits_SV, *inputs)


def sample_unsorted(
    logits_RV: torch.Tensor, inverse_temperature_R1: torch.Tensor, log_min_p_R1: torch.Tensor | None, uniform_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """token ~ softmax(logits / temperature) over the tokens with at least min_p times the largest probability.

    logits_RV: float32. log_min_p_R1: log(min_p), -inf for rows without it, None if no row has it. uniform_R1: float32 in
    [0, 1). → tokens int64 [R] and each row's largest logit [R]. Chooses first a block of the vocabulary, then a token of
    the block.
    """
    max_R1 = logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = (logits_RV - max_R1).mul_(inverse_temperature_R1)
    if log_min_p_R1 is not None:
        weights_RV.masked_fill_(weights_RV < log_min_p_R1, float("-inf"))
    weights_RV.mul_(_LOG2_E).exp2_()
    num_rows, vocab_size = weights_RV.shape
    if vocab_size % VOCAB_BLOCK:
        weights_RV = torch.nn.functional.pad(weights_RV, (0, VOCAB_BLOCK - vocab_size % VOCAB_BLOCK))
    weights_RBv = weights_RV.view(num_rows, -1, VOCAB_BLOCK)
    sums_RB = weights_RBv.sum(dim=-1).double()
    cumulative_RB = sums_RB.cumsum(dim=-1)
    threshold_R1 = uniform_R1 * cumulative_RB[:, -1:] * _BELOW_ONE
    block_R1 = (cumulative_RB <= threshold_R1).sum(dim=-1, keepdim=True)
    before_R1 = cumulative_RB.gather(1, block_R1) - sums_RB.gather(1, block_R1)
    inside_Rv = weights_RBv.gather(1, block_R1[:, :, None].expand(-1, 1, VOCAB_BLOCK)).squeeze(1).double().cumsum(dim=-1)
    rest_R1 = torch.minimum(threshold_R1 - before_R1, inside_Rv[:, -1:] * _BELOW_ONE)
    offset_R = (inside_Rv <= rest_R1).sum(dim=-1)
    tokens_R = (block_R1.squeeze(1) * VOCAB_BLOCK + offset_R).clamp_(max=vocab_size - 1)
    return tokens_R, max_R1.squeeze(1)


def sample_top_k(
    logits_RV: torch.Tensor,
    top_k: int,
    inverse_temperature_R1: torch.Tensor,
    log_min_p_R1: torch.Tensor | None,
    top_p_R1: torch.Tensor | None,
    uniform_R1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """token ~ softmax(logits / temperature) over the tokens that min_p, then top_k, then top_p keep.

    top_k: one for all rows; V sorts the whole vocabulary. Tokens that equal the k-th are kept too. top_p keeps the likeliest
    tokens until their mass reaches top_p of what min_p and top_k kept, and those that equal the last. Other arguments as in
    `sample_unsorted`. → tokens int64 [R] and each row's largest logit [R].
    """
    if top_k < logits_RV.shape[1]:
        # One more than k shows whether the k-th has an equal beyond; then all of these are fetched, which is rare.
        values_RK, ids_RK = logits_RV.topk(top_k + 1, dim=-1)
        kth_R1 = values_RK[:, top_k - 1 : top_k]
        has_equal_R1 = (values_RK[:, top_k:] == kth_R1) & (kth_R1 > float("-inf"))
        if bool(has_equal_R1.any()):
            num_kept = int(((logits_RV >= kth_R1) & has_equal_R1).sum(dim=-1).max())
            values_RK, ids_RK = logits_RV.topk(max(num_kept, top_k + 1), dim=-1)
        values_RK = values_RK.masked_fill(values_RK < kth_R1, float("-inf"))
    else:
        values_RK, ids_RK = logits_RV.sort(dim=-1, descending=True, stable=True)
    max_R1 = values_RK[:, :1]
    scaled_RK = (values_RK - max_R1).mul_(inverse_temperature_R1)
    if log_min_p_R1 is not None:
        scaled_RK.masked_fill_(scaled_RK < log_min_p_R1, float("-inf"))
    choice_R1 = choose_sorted(scaled_RK.exp_().double(), top_p_R1, uniform_R1)
    return ids_RK.gather(1, choice_R1).squeeze(1), max_R1.squeeze(1)


def choose_sorted(weights_RK: torch.Tensor, top_p_R1: torch.Tensor | None, uniform_R1: torch.Tensor) -> torch.Tensor:
    """A column int64 [R, 1] drawn from descending weights (float64) that are cut to top_p of their sum."""
    cumulative_RK = weights_RK.cumsum(dim=-1)
    kept_R1 = cumulative_RK[:, -1:]
    if top_p_R1 is not None:
        # A token is kept while the mass before it is less than top_p, so the kept tokens are a prefix.
        inside_RK = (cumulative_RK - weights_RK) < top_p_R1 * kept_R1
        last_R1 = weights_RK.gather(1, inside_RK.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0))
        inside_RK |= weights_RK >= last_R1
        kept_R1 = torch.where(inside_RK, cumulative_RK, 0.0).amax(dim=-1, keepdim=True)
    threshold_R1 = uniform_R1 * kept_R1 * _BELOW_ONE
    return (cumulative_RK <= threshold_R1).sum(dim=-1, keepdim=True).clamp_(max=weights_RK.shape[1] - 1)


def sample_top_p(
    logits_RV: torch.Tensor,
    inverse_temperature_R1: torch.Tensor,
    log_min_p_R1: torch.Tensor | None,
    top_p_R1: torch.Tensor,
    uniform_R1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """token ~ softmax(logits / temperature) over the tokens that min_p, then top_p keep. Arguments as in `sample_top_k`.

    On the CPU only tokens that top_p may keep are sorted. Tokens below (1 - top_p) / V of the mass sum to less than what
    top_p drops, so they cannot be kept.
    """
    vocab_size = logits_RV.shape[1]
    if not platform_of(logits_RV.device).shares_host_memory:
        return sample_top_k(logits_RV, vocab_size, inverse_temperature_R1, log_min_p_R1, top_p_R1, uniform_R1)
    max_R1 = logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = (logits_RV - max_R1).mul_(inverse_temperature_R1)
    if log_min_p_R1 is not None:
        weights_RV.masked_fill_(weights_RV < log_min_p_R1, float("-inf"))
    weights_RV.mul_(_LOG2_E).exp2_()
    totals_R1 = weights_RV.sum(dim=-1, keepdim=True)
    cutoffs_R1 = totals_R1 * (1.0 - top_p_R1) * ((1.0 - 1e-3) / vocab_size)
    tokens = np.zeros(logits_RV.shape[0], dtype=np.int64)
    weights, cutoffs, limits = weights_RV.numpy(), cutoffs_R1.numpy(), (totals_R1.double() * top_p_R1).numpy()
    for row, uniform in enumerate(uniform_R1[:, 0].tolist()):
        candidates = np.flatnonzero(weights[row] > cutoffs[row])
        if len(candidates) == 0:  # the logits are not finite, and the caller reports the row
            continue
        candidate_weights = weights[row, candidates]
        kept = top_p_indices(candidate_weights, float(limits[row, 0]))
        cumulative = candidate_weights[kept].cumsum(dtype=np.float64)
        choice = cumulative.searchsorted(uniform * cumulative[-1] * _BELOW_ONE, side="right")
        tokens[row] = candidates[kept[choice]]
    return torch.from_numpy(tokens), max_R1.squeeze(1)


def top_p_indices(weights: np.ndarray, limit: float) -> np.ndarray:
    """Indices, ascending, of the largest weights whose sum reaches `limit`, at least one, and of all that equal the last.

    weights: float32, positive. Many weights are first put into buckets by their leading bits, so that only the bucket at
    the limit must be sorted.
    """
    if len(weights) <= MAX_SORTED:
        order = np.argsort(-weights, kind="stable")
        before = np.concatenate([[0.0], weights[order[:-1]].cumsum(dtype=np.float64)])
        return np.flatnonzero(weights >= weights[order[max(1, int(before.searchsorted(limit, side="left"))) - 1]])
    # Bit patterns of positive floats are ordered like their values. The exponent and 4 bits of the mantissa are the bucket.
    buckets = (weights.view(np.int32) >> 19).astype(np.int64)
    lowest = int(buckets.min())
    buckets -= lowest
    from_top = np.bincount(buckets, weights=weights)[::-1].cumsum()
    from_top_index = min(int(from_top.searchsorted(limit, side="left")), len(from_top) - 1)
    boundary = len(from_top) - 1 - from_top_index
    in_boundary = np.flatnonzero(buckets == boundary)
    above = float(from_top[from_top_index - 1]) if from_top_index else 0.0
    order = in_boundary[np.argsort(-weights[in_boundary], kind="stable")]
    before = above + np.concatenate([[0.0], weights[order[:-1]].cumsum(dtype=np.float64)])
    last = order[max(1, int(before.searchsorted(limit, side="left"))) - 1]
    return np.flatnonzero(weights >= weights[last])

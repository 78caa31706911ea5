"""`cas::mla_attention` in plain torch: the reference, and what runs on the CPU.

Shape legend as in `mla.py`; L query tokens and K cached tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.quantization import round_to_cache
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

_QUERY_TILE = 256  # queries whose scores are in memory at a time


def torch_mla(operands: LatentOperands, metadata: AttentionMetadata) -> torch.Tensor:
    """As `LatentAttention.mla_forward`; padding tokens get zeros. Scores and softmax are in float32 or wider."""
    q_THE, kv_a_TE, cache, scale = operands.q_THE, operands.kv_a_TE, operands.cache, operands.scale
    cos_TR, sin_TR, interleaved = operands.cos_TR, operands.sin_TR, operands.interleaved
    num_tokens, num_heads, _ = q_THE.shape
    nope_size, rope_size, values, latent_size = operands.sizes
    page_size = cache.shape[1]
    latent_TC = F.rms_norm(kv_a_TE[:, :latent_size], (latent_size,), operands.norm_weight_C, operands.eps)
    k_rope_TR = rotate(kv_a_TE[:, None, latent_size:], cos_TR, sin_TR, interleaved)[:, 0]
    tokens = (metadata.slot_mapping[:num_tokens] >= 0).nonzero().squeeze(1)
    slots = metadata.slot_mapping[tokens]
    entries = torch.cat((latent_TC, k_rope_TR), dim=1)[tokens]
    cache[slots // page_size, slots % page_size] = round_to_cache(entries, cache.dtype)

    q_rope_THR = rotate(q_THE[:, :, nope_size:], cos_TR, sin_TR, interleaved)
    heads = operands.kv_b.view(num_heads, nope_size + values, latent_size)
    out_THV = q_THE.new_zeros(num_tokens, num_heads, values)
    starts = metadata.query_start_loc.tolist()
    absorbed: list[tuple[slice, torch.Tensor]] = []
    for s, seq_len in enumerate(metadata.seq_lens[: metadata.num_seqs].tolist()):
        tokens_L, num_queries = slice(starts[s], starts[s + 1]), starts[s + 1] - starts[s]
        if seq_len == 0 or num_queries == 0:
            continue
        pages = metadata.block_table[s, : (seq_len + page_size - 1) // page_size].long()
        entries_KE = cache[pages].flatten(0, 1)[:seq_len].to(q_THE.dtype)
        by_absorbing = num_queries * (latent_size * (nope_size + values) + seq_len * (2 * latent_size + rope_size))
        by_expanding = seq_len * (latent_size * (nope_size + values) + num_queries * (nope_size + rope_size + values))
        if by_absorbing <= by_expanding:
            absorbed.append((tokens_L, entries_KE))
            continue
        q_nope_HLN, q_rope_HLR = (part[tokens_L].transpose(0, 1) for part in (q_THE[:, :, :nope_size], q_rope_THR))
        out_THV[tokens_L] = _materialized(q_nope_HLN, q_rope_HLR, entries_KE, heads, scale).transpose(0, 1)
    if absorbed:  # the products by the heads' weights are of all sequences together
        rows = torch.cat([torch.arange(one.start, one.stop, device=q_THE.device) for one, _ in absorbed])
        q_nope_HTN, q_rope_HTR = q_THE[rows, :, :nope_size].transpose(0, 1), q_rope_THR[rows].transpose(0, 1)
        caches = [(one.stop - one.start, entries_KE) for one, entries_KE in absorbed]
        out_THV[rows] = _absorbed(q_nope_HTN, q_rope_HTR, caches, heads, scale).transpose(0, 1)
    return out_THV


def rotate(x_TXR: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """RoPE. The first values of all pairs come before the second values, in x's dtype; computed in float32 or wider. → [T, X, R]"""
    half = x_TXR.shape[2] // 2
    wide_TXR = x_TXR.to(torch.promote_types(x_TXR.dtype, torch.float32))
    first, second = (wide_TXR[..., 0::2], wide_TXR[..., 1::2]) if interleaved else (wide_TXR[..., :half], wide_TXR[..., half:])
    cos, sin = cos_TR[:, None, :half], sin_TR[:, None, :half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TXR.dtype)


def _absorbed(
    q_nope_HTN: torch.Tensor, q_rope_HTR: torch.Tensor, sequences: Sequence[tuple[int, torch.Tensor]], heads: torch.Tensor, scale: float
) -> torch.Tensor:
    """sequences: of each, the number of its query tokens and its entries [K, C + R]. heads: [H, N + V, C]. → [H, T, V]"""
    nope_size, latent_size = q_nope_HTN.shape[2], heads.shape[2]
    q_HTE = torch.cat((torch.bmm(q_nope_HTN, heads[:, :nope_size]), q_rope_HTR), dim=2)
    by_sequence = q_HTE.split([count for count, _ in sequences], dim=1)
    summed_HTC = torch.cat(
        [
            _attend(q_HLE, entries_KE, entries_KE[:, :latent_size], scale)
            for q_HLE, (_, entries_KE) in zip(by_sequence, sequences, strict=True)
        ],
        dim=1,
    )
    return torch.bmm(summed_HTC, heads[:, nope_size:].transpose(1, 2))


def _materialized(
    q_nope_HLN: torch.Tensor, q_rope_HLR: torch.Tensor, entries_KE: torch.Tensor, heads: torch.Tensor, scale: float
) -> torch.Tensor:
    """Of one sequence. heads: [H, N + V, C]. → [H, L, V]"""
    nope_size, latent_size = q_nope_HLN.shape[2], heads.shape[2]
    kv_HKE = F.linear(entries_KE[:, :latent_size], heads.flatten(0, 1)).unflatten(1, heads.shape[:2]).transpose(0, 1)
    k_rope_HKR = entries_KE[None, :, latent_size:].expand(len(heads), -1, -1)
    k_HKE = torch.cat((kv_HKE[:, :, :nope_size], k_rope_HKR), dim=2)
    return _attend(torch.cat((q_nope_HLN, q_rope_HLR), dim=2), k_HKE, kv_HKE[:, :, nope_size:], scale)


def _attend(q_HLE: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last L of K tokens. keys, values: [K, …] of all heads, or [H, K, …]. → [H, L, V] in q's dtype"""
    math_dtype = torch.promote_types(q_HLE.dtype, torch.float32)
    keys, values = keys.to(math_dtype).transpose(-1, -2), values.to(math_dtype)
    first = keys.shape[-1] - q_HLE.shape[1]
    parts = []
    for begin, q in zip(range(0, q_HLE.shape[1], _QUERY_TILE), q_HLE.to(math_dtype).split(_QUERY_TILE, dim=1), strict=True):
        stop = first + begin + q.shape[1]
        scores_HLK = torch.matmul(q, keys[..., :stop]) * scale
        positions_L = torch.arange(first + begin, stop, device=q.device)
        hidden_LK = torch.arange(stop, device=q.device) > positions_L[:, None]
        probs_HLK = scores_HLK.masked_fill_(hidden_LK, float("-inf")).softmax(-1)
        parts.append(torch.matmul(probs_HLK, values[..., :stop, :]).to(q_HLE.dtype))
    return torch.cat(parts, dim=1)

"""`TorchAttention`: the reference attention backend, plain torch on any device.

Shape legend: T tokens of the step, L query tokens of one sequence, C cached tokens of one sequence, S sequences, H query heads,
K key/value heads, G = H / K query heads per key/value head, E head size, N cache blocks, P tokens per block, M block-table columns.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, AttentionBackend, Scores, cache_unsupported_reason
from compile_and_serve.custom_ops.attention.int8_cache import int8_parts
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.rope_attention import norm_rope_reference
from compile_and_serve.custom_ops.quantization import quantize_activations, round_to_cache
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata


def write_kv_cache(k_TKE: torch.Tensor, v_TKE: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """kv_cache[slot // P, 0, :, slot % P] = k and kv_cache[slot // P, 1, :, slot % P] = v for each token whose slot is not -1.

    k_TKE, v_TKE: [T, K, E]; kv_cache: [N, 2, K, P, E] (mutated), q's dtype, float8_e4m3fn or int8 (then as in `int8_cache.py`);
    slot_mapping_T: int64 [T].
    """
    block_size = kv_cache.shape[3]
    tokens = (slot_mapping_T >= 0).nonzero().squeeze(1)
    slots = slot_mapping_T[tokens]
    blocks, offsets = slots // block_size, slots % block_size
    if kv_cache.dtype == torch.int8:
        values, scales = int8_parts(kv_cache)
        for i, x_TKE in enumerate((k_TKE[tokens], v_TKE[tokens])):
            quantized, scale = quantize_activations(x_TKE.flatten(0, 1), torch.int8)
            values[blocks, i, :, offsets] = quantized.view_as(x_TKE)
            scales[blocks, i, :, offsets] = scale.view(x_TKE.shape[:2]).float()
        return
    kv_cache[blocks, 0, :, offsets] = round_to_cache(k_TKE[tokens], kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = round_to_cache(v_TKE[tokens], kv_cache.dtype)


def read_blocks(kv_cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cache blocks in `dtype`. → [blocks, 2, K, P, E]"""
    if kv_cache.dtype != torch.int8:
        return kv_cache[blocks].to(dtype)
    values, scales = int8_parts(kv_cache)
    return values[blocks].to(dtype) * scales[blocks][..., None].to(dtype)


class TorchAttention(AttentionBackend):
    """Attends one sequence at a time. Scores, softmax and the weighted sum are in float32 (float64 for float64 inputs)."""

    name = "torch"
    decode_capturable = False
    drafts_capturable = False
    fuses_rope = False
    masks_nothing = True

    def unsupported_reason(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        features: frozenset[AttentionFeature] = frozenset(),
    ) -> str | None:
        """As `AttentionBackend.unsupported_reason`."""
        if not dtype.is_floating_point:
            return f"attention needs a floating-point dtype, not {dtype}"
        if reason := cache_unsupported_reason(dtype, kv_cache_dtype, head_dim, features):
            return reason
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads"
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Does nothing: the layers share nothing."""

    def forward(
        self,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        metadata: AttentionMetadata,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        """Write k and v at slot_mapping, then attend. → [T, H, E] in q's dtype; padding tokens get zeros."""
        num_tokens, num_heads, head_dim = q_THE.shape
        num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
        write_kv_cache(k_TKE, v_TKE, kv_cache, metadata.slot_mapping[:num_tokens])

        math_dtype = torch.promote_types(q_THE.dtype, torch.float32)
        out_THE = q_THE.new_zeros(num_tokens, num_heads, head_dim)
        starts = metadata.query_start_loc.tolist()
        for s, seq_len in enumerate(metadata.seq_lens[: metadata.num_seqs].tolist()):
            begin, end = starts[s], starts[s + 1]
            if end == begin or seq_len == 0:
                continue
            blocks = metadata.block_table[s, : (seq_len + block_size - 1) // block_size].long()
            # [blocks, 2, K, P, E] → [2, K, C, E]
            kv = read_blocks(kv_cache, blocks, math_dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
            k_KCE, v_KCE = kv[0], kv[1]
            q_KGLE = q_THE[begin:end].to(math_dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores_KGLC = torch.einsum("kgle,kce->kglc", q_KGLE, k_KCE) * scale
            query_position_L = torch.arange(seq_len - (end - begin), seq_len, device=q_THE.device)
            if not metadata.is_causal:
                query_position_L = torch.full_like(query_position_L, seq_len - 1)
            ahead_L = None if scores.ahead_T is None else scores.ahead_T[begin:end]
            hidden_LC = _hidden(query_position_L, seq_len, metadata.window, metadata.chunked, ahead_L)
            probs_KGLC = _probabilities(scores_KGLC, hidden_LC, query_position_L, scores)
            # Blocks outside of the window may hold anything, NaN too.
            v_KCE = v_KCE.masked_fill(hidden_LC.all(0)[:, None], 0.0)
            out_KGLE = torch.einsum("kglc,kce->kgle", probs_KGLC, v_KCE)
            out_THE[begin:end] = out_KGLE.permute(2, 0, 1, 3).flatten(1, 2).to(q_THE.dtype)
        return out_THE

    def rope_forward(
        self,
        qkv: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        kv_cache: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        q_norm_weight_E: torch.Tensor | None,
        k_norm_weight_E: torch.Tensor | None,
        eps: float,
        metadata: AttentionMetadata,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        """As `AttentionBackend.rope_forward`."""
        heads_TNE = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
        q_THE, k_TKE, v_TKE = heads_TNE.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        q_THE = norm_rope_reference(q_THE, cos_TE, sin_TE, q_norm_weight_E, eps)
        k_TKE = norm_rope_reference(k_TKE, cos_TE, sin_TE, k_norm_weight_E, eps)
        return self.forward(q_THE, k_TKE, v_TKE, kv_cache, scale, metadata, scores).flatten(1)

    def mla_forward(self, operands: LatentOperands, metadata: AttentionMetadata) -> torch.Tensor:
        """As `LatentAttention.mla_forward`."""
        from compile_and_serve.custom_ops.attention.mla_torch import torch_mla

        return torch_mla(operands, metadata)


def _hidden(query_position_L: torch.Tensor, seq_len: int, window: int | None, chunked: bool, ahead_L: torch.Tensor | None) -> torch.Tensor:
    """bool [L, C]: the cached tokens that a query token does not attend to."""
    key_position_C = torch.arange(seq_len, device=query_position_L.device)
    last_L = query_position_L if ahead_L is None else query_position_L + ahead_L
    hidden_LC = key_position_C > last_L[:, None]
    if window is None:
        return hidden_LC
    first_L = query_position_L // window * window if chunked else query_position_L - window + 1
    return hidden_LC | (key_position_C < first_L[:, None])


def _probabilities(scores_KGLC: torch.Tensor, hidden_LC: torch.Tensor, query_position_L: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The softmax over the cached tokens, as `Scores` describes it. → [K, G, L, C]"""
    by_head = scores_KGLC.shape[:2]
    if scores.soft_cap:
        scores_KGLC = scores.soft_cap * torch.tanh(scores_KGLC / scores.soft_cap)
    if scores.alibi_slopes_H is not None:
        distance_LC = torch.arange(hidden_LC.shape[1], device=hidden_LC.device) - query_position_L[:, None]
        slopes_KG11 = scores.alibi_slopes_H.to(scores_KGLC.dtype).view(*by_head, 1, 1)
        scores_KGLC = scores_KGLC + slopes_KG11 * distance_LC
    scores_KGLC = scores_KGLC.masked_fill(hidden_LC, float("-inf"))
    if scores.sinks_H is None:
        return scores_KGLC.softmax(-1)
    sinks_KGL1 = scores.sinks_H.to(scores_KGLC.dtype).view(*by_head, 1, 1).expand(*scores_KGLC.shape[:3], 1)
    return torch.cat((scores_KGLC, sinks_KGL1), dim=-1).softmax(-1)[..., :-1]

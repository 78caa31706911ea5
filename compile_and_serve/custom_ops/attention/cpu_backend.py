"""`CpuAttention`: the attention backend over the C++ kernels of csrc/cpu/attention.cpp.

Shape legend: T tokens of the step, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, AttentionBackend, Scores, cache_unsupported_reason
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.jit.cpu_kernels import cpu_kernels_status, load_cpu_kernels
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

_MAX_HEAD_DIM = 512
_MAX_GROUP = 96


class CpuAttention(AttentionBackend):
    """KV write and paged attention in one kernel call, with head norms and RoPE in `rope_forward`.

    Computes in float32 or bfloat16. The cache has the same dtype, float8_e4m3fn or int8.
    """

    name = "cpu"
    decode_capturable = False
    drafts_capturable = False
    fuses_rope = True
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
        """As `AttentionBackend.unsupported_reason`. Builds the kernels at the first call."""
        if not platform_of(device).runs_cpp_kernels:
            return f"the cpu attention backend runs on the CPU only, not on {device.type}"
        if "latent" in features:
            return "the cpu attention backend has no kernel for latent caches"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the cpu attention backend takes float32 and bfloat16, not {dtype}"
        if reason := cache_unsupported_reason(dtype, kv_cache_dtype, head_dim, features):
            return reason
        if head_dim % 16 or head_dim > _MAX_HEAD_DIM:
            return f"the cpu attention backend takes head sizes that are multiples of 16 up to {_MAX_HEAD_DIM}, not {head_dim}"
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads"
        if num_heads // num_kv_heads > _MAX_GROUP:
            group = num_heads // num_kv_heads
            return f"the cpu attention backend takes up to {_MAX_GROUP} query heads per key/value head, not {group}"
        load_cpu_kernels()
        return cpu_kernels_status()

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
        """Write k and v at slot_mapping, then attend. → [T, H, E] in q's dtype; padding tokens get zeros.

        Steps with images whose tokens attend to later ones run in plain torch.
        """
        if scores.ahead_T is not None:
            return TorchAttention().forward(q_THE, k_TKE, v_TKE, kv_cache, scale, metadata, scores)
        return torch.ops.cas.cpu_attention.default(
            q_THE,
            k_TKE,
            v_TKE,
            kv_cache,
            scale,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.num_seqs,
            metadata.window or (0 if metadata.is_causal else -1),
            metadata.chunked,
            scores.soft_cap,
            scores.sinks_H,
            scores.alibi_slopes_H,
        )

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
        """As `compile_and_serve.custom_ops.attention.rope_attention.rope_attention`. → [T, H*E]"""
        return torch.ops.cas.cpu_rope_attention.default(
            qkv,
            cos_TE,
            sin_TE,
            kv_cache,
            num_heads,
            num_kv_heads,
            scale,
            q_norm_weight_E,
            k_norm_weight_E,
            eps,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.num_seqs,
            metadata.window or (0 if metadata.is_causal else -1),
            metadata.chunked,
            scores.soft_cap,
            scores.sinks_H,
            scores.alibi_slopes_H,
        )

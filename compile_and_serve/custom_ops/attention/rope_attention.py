"""`cas::rope_attention`: head norms, rotary embedding, KV write and attention of one layer in one op; a split point.

Shape legend: T tokens of the step, H query heads, K key/value heads, E head size, N cache blocks, P tokens per block.

Like `cas::attention`, the op reads the step's `AttentionMetadata` and calls its backend.
"""

from __future__ import annotations

from typing import Any

import torch

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, Scores
from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import current_metadata


def norm_rope_reference(
    x_TNE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, norm_weight_E: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """y = x̂ · cos + rotate_half(x̂) · sin with x̂ = rms_norm(x) · weight over E (or x without a weight).

    x_TNE: [T, heads, E]; cos_TE, sin_TE: [T, E]; norm_weight_E: [E]. In float32, with one rounding to x's dtype. → [T, heads, E]
    """
    math_dtype = torch.promote_types(x_TNE.dtype, torch.float32)
    y_TNE = x_TNE.to(math_dtype)
    if norm_weight_E is not None:
        y_TNE = y_TNE * torch.rsqrt(y_TNE.square().mean(-1, keepdim=True) + eps) * norm_weight_E.to(math_dtype)
    low, high = y_TNE.chunk(2, dim=-1)
    rotated_TNE = torch.cat((-high, low), dim=-1)
    cos_T1E, sin_T1E = cos_TE.to(math_dtype).unsqueeze(1), sin_TE.to(math_dtype).unsqueeze(1)
    return (y_TNE * cos_T1E + rotated_TNE * sin_T1E).to(x_TNE.dtype)


def _rope_attention(
    qkv: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    q_norm_weight_E: torch.Tensor | None = None,
    k_norm_weight_E: torch.Tensor | None = None,
    eps: float = 1e-6,
    group: str = KV_CACHES,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    metadata = current_metadata(group)
    scores = Scores(soft_cap, sinks_H) if soft_cap or sinks_H is not None else PLAIN_SCORES
    return metadata.backend.rope_forward(
        qkv, cos_TE, sin_TE, kv_cache, num_heads, num_kv_heads, scale, q_norm_weight_E, k_norm_weight_E, eps, metadata, scores
    )


def _rope_attention_fake(qkv: torch.Tensor, cos: Any, sin: Any, kv_cache: Any, num_heads: int, num_kv_heads: int, *_: Any) -> torch.Tensor:
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    return qkv.new_empty(qkv.shape[0], num_heads * head_dim)


ROPE_ATTENTION = define(
    "rope_attention(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) kv_cache, int num_heads, int num_kv_heads, float scale, "
    'Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, float eps=1e-6, str group="kv_caches", float soft_cap=0.0, '
    "Tensor? sinks=None) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=3,
    fake=_rope_attention_fake,
    CompositeExplicitAutograd=_rope_attention,
)


def rope_attention(
    qkv: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    q_norm_weight_E: torch.Tensor | None = None,
    k_norm_weight_E: torch.Tensor | None = None,
    eps: float = 1e-6,
    group: str = KV_CACHES,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = attention(rope(norm(q)), rope(norm(k)), v): split qkv into heads, normalize, rotate, write the cache, attend.

    qkv: [T, (H + 2K) * E], rows may be strided; cos_TE, sin_TE: [T, E], both halves equal, float32 or qkv's dtype;
    kv_cache: [N, 2, K, P, E] (mutated); *_norm_weight_E: [E], None: no head norm; scale: usually E ** -0.5.
    group, soft_cap, sinks_H: as of `attention`.
    → [T, H * E] in qkv's dtype. RoPE is the half-split one (GPT-NeoX, Hugging Face `rotate_half`).
    """
    return ROPE_ATTENTION(
        qkv, cos_TE, sin_TE, kv_cache, num_heads, num_kv_heads, scale, q_norm_weight_E, k_norm_weight_E, eps, group, soft_cap, sinks_H
    )

"""`cas::mla_attention`: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged latent cache; graphs are split at it.

Shape legend: T tokens of the step, H heads, N size of a head's query and key without RoPE, R size of the part with RoPE, V size of a
head's value, C size of the latent, P tokens per page.

A token's cache entry is its normalized latent c [C] and its rotated key k_r [R], which all heads share. Keys and values of head h follow
from it: k = (W_k c, k_r) and v = W_v c, where W_k [N, C] and W_v [V, C] are the head's rows of `kv_b`. There are two ways to attend:
- absorbed: q·k = (W_kᵀ q_n)·c + q_r·k_r, and the weighted sum of v is W_v times the weighted sum of c. All heads read one entry.
- materialized: keys and values are computed from the entries first, which takes fewer operations where many queries read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from compile_and_serve.custom_ops.library import ROWS, OpKind, Sharding, define
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import current_metadata


@dataclass(frozen=True, slots=True)
class LatentOperands:
    """The arguments of `mla_attention`, without the group."""

    q_THE: torch.Tensor
    kv_a_TE: torch.Tensor
    norm_weight_C: torch.Tensor
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor
    kv_b: torch.Tensor
    cache: torch.Tensor
    scale: float
    eps: float = 1e-6
    interleaved: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """N, R, V, C."""
        nope_size, rope_size = self.q_THE.shape[2] - self.cos_TR.shape[1], self.cos_TR.shape[1]
        value_size = self.kv_b.shape[0] // self.q_THE.shape[1] - nope_size
        return nope_size, rope_size, value_size, self.norm_weight_C.shape[0]


class LatentAttention(Protocol):
    """What an attention backend that runs groups of latent caches has beside `AttentionBackend`."""

    def mla_forward(self, operands: LatentOperands, metadata: AttentionMetadata) -> torch.Tensor:
        """As `mla_attention`, with the metadata as an argument. → [T, H, V]"""
        ...


def _mla_attention(
    q_THE: torch.Tensor,
    kv_a_TE: torch.Tensor,
    norm_weight_C: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    eps: float = 1e-6,
    interleaved: bool = True,
    group: str = KV_CACHES,
) -> torch.Tensor:
    metadata = current_metadata(group)
    operands = LatentOperands(q_THE, kv_a_TE, norm_weight_C, cos_TR, sin_TR, kv_b, cache, scale, eps, interleaved)
    return metadata.backend.mla_forward(operands, metadata)


def _mla_attention_fake(*args: Any) -> torch.Tensor:
    operands = LatentOperands(*args[:10])
    return operands.q_THE.new_empty(*operands.q_THE.shape[:2], operands.sizes[2])


MLA_ATTENTION = define(
    "mla_attention(Tensor q, Tensor kv_a, Tensor norm_weight, Tensor cos, Tensor sin, Tensor kv_b, Tensor(a!) cache, float scale, "
    'float eps=1e-6, bool interleaved=True, str group="kv_caches") -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=_mla_attention_fake,
    sharding=Sharding(inputs={"q": 1}, output=1, weights={"kv_b": ROWS}, must_shard=True),  # all heads read the same latents
    CompositeExplicitAutograd=_mla_attention,
)


def mla_attention(
    q_THE: torch.Tensor,
    kv_a_TE: torch.Tensor,
    norm_weight_C: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    kv_b: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
    group: str = KV_CACHES,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + mask) v over each sequence's cached tokens; the step's entries are written to the cache first.

    q_THE: [T, H, N + R] before RoPE, rows may be strided. kv_a_TE: [T, C + R]: the latent before its RMSNorm (norm_weight_C, eps), and
    the shared key before RoPE. cos_TR, sin_TR: [T, R] with equal halves. kv_b: [H · (N + V), C], of each head its keys' rows before its
    values'. cache: [N pages, P, C + R] (mutated), q's dtype or float8_e4m3fn. interleaved: RoPE rotates pairs (2i, 2i + 1), else
    (i, i + R/2). group: the state group that the cache belongs to. → [T, H, V] in q's dtype.
    Cache entries, rotated queries, and W_kᵀ q_n and the weighted sums of latents where they are absorbed, are rounded to q's dtype.
    """
    return MLA_ATTENTION(q_THE, kv_a_TE, norm_weight_C, cos_TR, sin_TR, kv_b, cache, scale, eps, interleaved, group)

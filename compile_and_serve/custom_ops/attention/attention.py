"""`cas::attention`: causal softmax attention over a paged KV cache; the op at which graphs are split.

Shape legend: T tokens of the step, S sequences, H query heads, K key/value heads (H % K == 0), E head size,
N cache blocks, P tokens a block, M block-table columns.

A model calls `attention(q_THE, k_TKE, v_TKE, kv_cache, scale)`. What differs from step to step (which token belongs to
which sequence, where its keys go) is not an argument: the op reads the running step's `AttentionMetadata` by the name of its
state group. So the captured graph has one dynamic dimension (T), and a backend may keep what it needs (plans, wrappers, split
counts).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.step import KV_CACHES, current_metadata, running


@dataclass(kw_only=True, slots=True)
class AttentionMetadata:
    """One step's batch as attention sees it. Tensors live on the model's device; integers are the host's.

    Sequences lie one after another on the token dimension: sequence s owns tokens query_start_loc[s] … query_start_loc[s+1]-1,
    and they are the last ones of its seq_lens[s] tokens. Decodes and prefill chunks mix freely.
    """

    backend: AttentionBackend
    query_start_loc: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S], tokens in the cache after this step's are written
    block_table: torch.Tensor  # int32 [S, M], column c holds the block of tokens c*P … (c+1)*P-1
    slot_mapping: torch.Tensor  # int64 [T], block * P + offset; -1: padding, nothing is written
    num_seqs: int
    num_tokens: int  # real tokens; T may be larger (padding), outputs there are unspecified but finite
    max_query_len: int
    max_seq_len: int
    # Host copies, for backends that plan on the host; without them such a backend has to wait for the device.
    query_start_loc_cpu: np.ndarray | None = None  # int32 [S + 1]
    seq_lens_cpu: np.ndarray | None = None  # int32 [S]


class AttentionBackend(Protocol):
    """A way to compute `cas::attention` on some device.

    KV cache layout, the same for every backend: [N, 2, K, P, E], keys at [:, 0], values at [:, 1]. Its dtype is q's or
    float8_e4m3fn: keys and values are then rounded to it (to the nearest, ties to even; beyond ±448 to ±448) with no scale, and
    the tokens of a step are attended as the cache keeps them where a backend reads them back from there.
    """

    name: str

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
    ) -> str | None:
        """None when the combination runs, else one sentence why not."""
        ...

    def plan(self, metadata: AttentionMetadata) -> None:
        """Called once a step, before the model runs, so that layers share what does not differ between them."""
        ...

    def forward(
        self,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write k and v at slot_mapping, then attend. Inputs may be strided views (last dimension contiguous). → [T, H, E]"""
        ...


class _EveryGroup(dict[str, AttentionMetadata]):
    """The same metadata for every state group."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        super().__init__()
        self._metadata = metadata

    def __missing__(self, group: str) -> AttentionMetadata:
        return self._metadata


def attention_metadata(metadata: AttentionMetadata) -> AbstractContextManager[None]:
    """Make `metadata` what attention ops of every state group read inside the block."""
    return running(_EveryGroup(metadata))


def _attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    group: str = KV_CACHES,
) -> torch.Tensor:
    metadata = current_metadata(group)
    return metadata.backend.forward(q_THE, k_TKE, v_TKE, kv_cache, scale, metadata)


def _attention_fake(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    group: str = KV_CACHES,
) -> torch.Tensor:
    return torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)


_attention_op = define(
    'attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, float scale, str group="kv_caches") -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=2,
    fake=_attention_fake,
    CompositeExplicitAutograd=_attention,
)


def attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    group: str = KV_CACHES,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + causal mask) v over each sequence's cached tokens; k and v are written to the cache first.

    q_THE: [T, H, E]; k_TKE, v_TKE: [T, K, E]; kv_cache: [N, 2, K, P, E] (mutated); scale: usually E ** -0.5; group: the state group
    that the cache belongs to.
    → [T, H, E] in q's dtype.
    """
    return _attention_op(q_THE, k_TKE, v_TKE, kv_cache, scale, group)

"""`cas::attention`: causal softmax attention over a paged KV cache; the op at which graphs are split.

Shape legend: T tokens of the step, H query heads, K key/value heads (H % K == 0), E head size, N cache blocks, P tokens per block.

A model calls `attention(q_THE, k_TKE, v_TKE, kv_cache, scale)`. The lengths, block tables and cache slots of a step are not arguments:
the op reads the running step's `AttentionMetadata` by the name of its state group. So the captured graph has one dynamic dimension (T),
and each backend can keep its own state (plans, wrappers, split counts). A window belongs to the state group too, because it decides
which blocks are kept. What is done to the scores is an argument of the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from compile_and_serve.custom_ops.library import ROWS, OpKind, Sharding, define
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import current_metadata


@dataclass(frozen=True, slots=True)
class Scores:
    """What attention does to its scores: s(i, j) = cap(scale · q_i k_j) + slope · (j - i), cap(x) = soft_cap · tanh(x / soft_cap).

    soft_cap: 0: none (Gemma 2). sinks_H: one more score of each row, whose value is zero (gpt-oss): it adds exp(sink) to the softmax's
    denominator. alibi_slopes_H: a penalty proportional to the distance (arXiv:2108.12409). Both are contiguous, float32 or q's dtype.
    ahead_T: contiguous int32, how many tokens behind itself a token attends to, in the same step (images of Gemma 3); None: none.
    """

    soft_cap: float = 0.0
    sinks_H: torch.Tensor | None = None
    alibi_slopes_H: torch.Tensor | None = None
    ahead_T: torch.Tensor | None = None


PLAIN_SCORES = Scores()


class AttentionBackend(Protocol):
    """An implementation of `cas::attention` for some devices.

    All backends use one KV cache layout: [N, 2, K, P, E], keys at [:, 0], values at [:, 1]. Its dtype is q's, float8_e4m3fn or int8. Keys
    and values are quantized to float8 without a scale (to nearest, ties to even, saturating at ±448), to int8 with a scale for each token
    and head, beside the values: [N, 2, K, P, E + 4], as `int8_cache.py` says. A backend that reads the step's own keys from the cache
    attends to their quantized values.

    decode_capturable: decodes read all lengths from the device, and take nothing from `plan` or the metadata's integers, so that a CUDA
    graph of them serves any lengths. drafts_capturable: so do steps with draft tokens, through `AttentionMetadata.row_seq_lens`.
    fuses_rope: `rope_forward` runs kernels, which beat head norms and RoPE in compiled pieces. masks_nothing: sequences of several tokens
    may each read all of their cached tokens (`StepLengths.is_causal`); if not, only sequences of one token.
    """

    name: str
    decode_capturable: bool
    drafts_capturable: bool
    fuses_rope: bool
    masks_nothing: bool = False

    @property
    def pending_workspace_bytes(self) -> int:
        """Bytes of device memory that later steps will take beside their tensors, for all instances together."""
        return 0

    @property
    def prompt_steps(self) -> Mapping[str, int]:
        """Which kernels ran the prompts, where the backend has several: name → steps, since the start."""
        return {}

    def without_modules(self) -> AbstractContextManager[None]:
        """Inside, no kernel module is loaded or used that is built at first use."""
        return nullcontext()

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
        """None when the backend supports the combination, else the reason in one sentence."""
        ...

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what the layers of a step share. Called once per step, before the model runs."""
        ...

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
        """Write k and v at slot_mapping, then attend. Inputs may be views with a contiguous last dimension. → [T, H, E]"""
        ...

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
        """As `compile_and_serve.custom_ops.attention.rope_attention.rope_attention`, with the metadata as an argument. → [T, H*E]"""
        ...


def cache_unsupported_reason(
    dtype: torch.dtype, kv_cache_dtype: torch.dtype, head_dim: int, features: frozenset[AttentionFeature]
) -> str | None:
    """Why a model in `dtype` cannot have a cache in `kv_cache_dtype`, in one sentence; None: it can."""
    if kv_cache_dtype == torch.int8 and "latent" not in features:
        return None if head_dim % 4 == 0 else f"an int8 cache needs a head size that is a multiple of 4, not {head_dim}"
    if kv_cache_dtype not in (dtype, torch.float8_e4m3fn):
        kind = "latent" if "latent" in features else "KV"
        return f"the {kind} cache of a model in {dtype} is in {dtype} or torch.float8_e4m3fn, not {kv_cache_dtype}"
    return None


def _attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    group: str = KV_CACHES,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    ahead_T: torch.Tensor | None = None,
) -> torch.Tensor:
    metadata = current_metadata(group)
    is_plain = not soft_cap and sinks_H is None and alibi_slopes_H is None and ahead_T is None
    scores = PLAIN_SCORES if is_plain else Scores(soft_cap, sinks_H, alibi_slopes_H, ahead_T)
    return metadata.backend.forward(q_THE, k_TKE, v_TKE, kv_cache, scale, metadata, scores)


ATTENTION = define(
    'attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, float scale, str group="kv_caches", float soft_cap=0.0, '
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? ahead=None) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=4,
    fake=lambda q_THE, *_: torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device),
    sharding=Sharding(
        inputs={"q": 1, "k": 1, "v": 1},
        output=1,
        weights={"sinks": ROWS, "alibi_slopes": ROWS},
        state={"kv_cache": (2, "k")},
        shared_inputs=("k", "v"),
        must_shard=True,
    ),
    CompositeExplicitAutograd=_attention,
)


def attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    group: str = KV_CACHES,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    ahead_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + mask) v over each sequence's cached tokens; k and v are written to the cache first.

    q_THE: [T, H, E]; k_TKE, v_TKE: [T, K, E]; kv_cache: [N, 2, K, P, E] (mutated); scale: usually E ** -0.5; group: the state group
    that the cache belongs to, whose window is the mask's. soft_cap, sinks_H, alibi_slopes_H, ahead_T: as in `Scores`; the state
    group names those that its layers use.
    → [T, H, E] in q's dtype.
    """
    return ATTENTION(q_THE, k_TKE, v_TKE, kv_cache, scale, group, soft_cap, sinks_H, alibi_slopes_H, ahead_T)

"""`cas::attention`: causal softmax attention over a paged KV cache; the op at which graphs are split.

Shape legend: T tokens of the step, S sequences, H query heads, K key/value heads (H % K == 0), E head size,
N cache blocks, P tokens per block, M block-table columns.

A model calls `attention(q_THE, k_TKE, v_TKE, kv_cache, scale)`. The lengths, block tables and cache slots of a step are not arguments:
the op reads the running step's `AttentionMetadata` by the name of its state group. So the captured graph has one dynamic dimension (T),
and each backend can keep its own state (plans, wrappers, split counts). A window belongs to the state group too, because it decides
which blocks are kept. What is done to the scores is an argument of the op.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from compile_and_serve.custom_ops.library import ROWS, OpKind, Sharding, define
from compile_and_serve.custom_ops.step import KV_CACHES, AttentionFeature, current_metadata


@dataclass(kw_only=True, slots=True)
class StepLengths:
    """The sequences of a step, which all of its state groups share. Tensors are on the model's device; integers are on the host.

    Sequences are contiguous in the token dimension: sequence s has tokens query_start_loc[s] … query_start_loc[s+1]-1, which are the
    last of its seq_lens[s] tokens. A batch may mix decodes and prefill chunks. Without sequences, keys and values are only written.
    """

    query_start_loc: torch.Tensor  # int32 [S + 1]
    seq_lens: torch.Tensor  # int32 [S], tokens in the cache, those of this step included
    num_seqs: int
    num_tokens: int  # without padding; T may be larger. Outputs of padding are unspecified but finite
    max_query_len: int
    max_seq_len: int
    # False: each sequence has one query token, anywhere among its tokens, which reads all of them.
    is_causal: bool = True
    # Host copies for backends that plan on the host. Without them, such a backend waits for the device.
    query_start_loc_cpu: np.ndarray | None = None  # int32 [S + 1]
    seq_lens_cpu: np.ndarray | None = None  # int32 [S]


@dataclass(kw_only=True, slots=True)
class AttentionMetadata(StepLengths):
    """A step as the attention ops of one state group see it."""

    backend: AttentionBackend
    block_table: torch.Tensor  # int32 [S, M], column c holds the block of tokens c*P … (c+1)*P-1
    slot_mapping: torch.Tensor  # int64 [T], block * P + offset; -1: padding, not written
    window: int | None = None  # a token reads the last `window` tokens, itself included; None: all
    chunked: bool = False  # a token reads only its own chunk of `window` tokens; chunks start at multiples of `window`
    # For a captured step in which all sequences have the same small number of tokens: they describe each token as a sequence that ends
    # with it. The graph itself fills them, so it does not depend on their addresses (compare=False).
    row_starts: torch.Tensor | None = field(default=None, compare=False)  # int32 [T + 1]
    row_seq_lens: torch.Tensor | None = field(default=None, compare=False)  # int32 [T]
    row_block_table: torch.Tensor | None = field(default=None, compare=False)  # int32 [T, M]

    def host_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The sequences' `query_start_loc` and `seq_lens` on the host: copied from the device if the `…_cpu` fields are not set."""
        starts, seq_lens = self.query_start_loc_cpu, self.seq_lens_cpu
        if starts is None or seq_lens is None:
            starts, seq_lens = self.query_start_loc.cpu().numpy(), self.seq_lens.cpu().numpy()
        return starts[: self.num_seqs + 1], seq_lens[: self.num_seqs]

    def add_rows(self, query_len: int) -> None:
        """Allocate the `row_…` tensors, for sequences of `query_len` tokens each. They describe padding until `fill_rows`."""
        num_tokens, device = query_len * self.seq_lens.shape[0], self.seq_lens.device
        self.row_starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        self.row_seq_lens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.row_block_table = torch.zeros(num_tokens, self.block_table.shape[1], dtype=torch.int32, device=device)

    def fill_rows(self, query_len: int) -> None:
        """Set the `row_…` tensors from the sequences' lengths and blocks, on the device. Rows of a sequence of length 0 have length 0."""
        assert self.row_seq_lens is not None
        assert self.row_block_table is not None
        lens_S1 = self.seq_lens[:, None]
        ends_Sq = lens_S1 - torch.arange(query_len - 1, -1, -1, device=lens_S1.device)
        self.row_seq_lens.copy_(torch.where(lens_S1 > 0, ends_Sq, 0).flatten())
        columns = self.block_table.shape[1]
        self.row_block_table.view(-1, query_len, columns).copy_(self.block_table[:, None].expand(-1, query_len, -1))


@dataclass(frozen=True, slots=True)
class Scores:
    """What attention does to its scores: s(i, j) = cap(scale · q_i k_j) + slope · (j - i), cap(x) = soft_cap · tanh(x / soft_cap).

    soft_cap: 0: none (Gemma 2). sinks_H: one more score of each row, whose value is zero (gpt-oss): it adds exp(sink) to the softmax's
    denominator. alibi_slopes_H: a penalty proportional to the distance (arXiv:2108.12409). Both are contiguous, float32 or q's dtype.
    """

    soft_cap: float = 0.0
    sinks_H: torch.Tensor | None = None
    alibi_slopes_H: torch.Tensor | None = None


PLAIN_SCORES = Scores()


class AttentionBackend(Protocol):
    """An implementation of `cas::attention` for some devices.

    All backends use one KV cache layout: [N, 2, K, P, E], keys at [:, 0], values at [:, 1]. Its dtype is q's, float8_e4m3fn or int8. Keys
    and values are quantized to float8 without a scale (to nearest, ties to even, saturating at ±448), to int8 with a scale for each token
    and head, beside the values: [N, 2, K, P, E + 4], as `int8_cache.py` says. A backend that reads the step's own keys from the cache
    attends to their quantized values.

    decode_capturable: decodes read all lengths from the device, and take nothing from `plan` or the metadata's integers, so that a CUDA
    graph of them serves any lengths. drafts_capturable: so do steps with draft tokens, through `AttentionMetadata.row_seq_lens`.
    fuses_rope: `rope_forward` runs kernels, which beat head norms and RoPE in compiled pieces.
    """

    name: str
    decode_capturable: bool
    drafts_capturable: bool
    fuses_rope: bool

    @property
    def pending_workspace_bytes(self) -> int:
        """Bytes of device memory that later steps will take beside their tensors, for all instances together."""
        return 0

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
) -> torch.Tensor:
    metadata = current_metadata(group)
    is_plain = not soft_cap and sinks_H is None and alibi_slopes_H is None
    scores = PLAIN_SCORES if is_plain else Scores(soft_cap, sinks_H, alibi_slopes_H)
    return metadata.backend.forward(q_THE, k_TKE, v_TKE, kv_cache, scale, metadata, scores)


ATTENTION = define(
    'attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, float scale, str group="kv_caches", float soft_cap=0.0, '
    "Tensor? sinks=None, Tensor? alibi_slopes=None) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=3,
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
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + mask) v over each sequence's cached tokens; k and v are written to the cache first.

    q_THE: [T, H, E]; k_TKE, v_TKE: [T, K, E]; kv_cache: [N, 2, K, P, E] (mutated); scale: usually E ** -0.5; group: the state group
    that the cache belongs to, whose window is the mask's. soft_cap, sinks_H, alibi_slopes_H: as in `Scores`; the state group names
    those that its layers use.
    → [T, H, E] in q's dtype.
    """
    return ATTENTION(q_THE, k_TKE, v_TKE, kv_cache, scale, group, soft_cap, sinks_H, alibi_slopes_H)

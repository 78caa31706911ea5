"""Kinds of state that keep an entry for every token, in pages of tokens: all tokens, a window of them, or chunks.

Shape legend: N pages, P tokens per page, K key/value heads, E head size, C latent size, R rotary size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.state.kind import (
    AttentionFeature,
    ExampleTokens,
    GroupLayout,
    LayerState,
    StateKind,
    StateTensor,
    one_behind_the_other,
)
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata, StepLengths

KV_CACHES = "kv_caches"  # the state group of full attention
WINDOW_CACHES = "window_caches"  # the state group of attention with a window
SCALE_BYTES = 4  # of a token's keys or values in a head of an int8 cache


class AttentionLayer(LayerState):
    """A layer whose op runs on an attention backend. num_kv_heads, head_dim: of what a token keeps."""

    attention: ClassVar[frozenset[AttentionFeature]] = frozenset()

    @property
    @abstractmethod
    def num_kv_heads(self) -> int: ...

    @property
    @abstractmethod
    def head_dim(self) -> int: ...

    @abstractmethod
    def of_rank(self, mesh: Mesh) -> AttentionLayer: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec(AttentionLayer):
    """Keys and values of one attention layer: [2, K, P, E] per page; in int8 [2, K, P, E + 4], as `int8_cache.py` says.

    whole_kv_heads: of all ranks; None: as many as one has.
    """

    num_kv_heads: int
    head_dim: int
    whole_kv_heads: int | None = None

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        entry = self.head_dim + (SCALE_BYTES if cache_dtype == torch.int8 else 0)
        return (StateTensor(shape=(2, self.num_kv_heads, tokens_per_page, entry)),)

    def of_rank(self, mesh: Mesh) -> KVCacheSpec:
        """One rank's share of the heads, or one head that several ranks keep."""
        if mesh.tensor == 1:
            return self
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // mesh.tensor), whole_kv_heads=self.whole_kv_heads or self.num_kv_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCacheSpec(AttentionLayer):
    """What one layer of multi-head latent attention keeps: [P, C + R] per page, the latent and the rotated key that all heads share."""

    attention: ClassVar[frozenset[AttentionFeature]] = frozenset(("latent",))

    latent_size: int
    rope_size: int

    @property
    def num_kv_heads(self) -> int:
        """Every head reads the same entry."""
        return 1

    @property
    def head_dim(self) -> int:
        """Values of a token's entry."""
        return self.latent_size + self.rope_size

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (StateTensor(shape=(tokens_per_page, self.head_dim)),)

    def of_rank(self, mesh: Mesh) -> LatentCacheSpec:
        """Every rank keeps all of it."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class AllTokens:
    """A token reads every token before it, and itself. Tensors are [N, …] in pages of P tokens, found through a block table."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    is_shareable: ClassVar[bool] = True
    snapshots: ClassVar[bool] = False
    rollback_tokens: ClassVar[int] = 0
    is_chunked: ClassVar[bool] = False

    @property
    def window(self) -> int | None:
        return None

    @property
    def features(self) -> frozenset[AttentionFeature]:
        return frozenset()

    def dtype_of(self, tensor: StateTensor, cache_dtype: torch.dtype) -> torch.dtype:
        """The KV cache's."""
        return tensor.dtype or cache_dtype

    def with_state_dtype(self, dtype: torch.dtype) -> AllTokens:
        return self

    def can_roll_back(self, num_tokens: int) -> bool:
        """Always: the entries of tokens that are taken back are not read, and written again."""
        return True

    def covers(self, other: StateKind) -> bool:
        return self.window is None or self == other

    def layout(self, tensors: Mapping[str, StateTensor], tokens_per_page: int, page_bytes: int | None = None) -> GroupLayout:
        return one_behind_the_other(tensors, tokens_per_page)

    def pages_of_request(self, layout: GroupLayout, max_model_len: int, max_step_tokens: int) -> int:
        size = layout.tokens_per_page
        pages = -(-max_model_len // size)
        return pages if self.window is None else min(pages, -(-(self.window + max_step_tokens) // size) + 1)

    def bytes_read(self, name: str, layout: GroupLayout, num_tokens: int) -> int:
        num_read = num_tokens if self.window is None else min(num_tokens, self.window)
        return num_read * layout.tensors[name].num_bytes // layout.tokens_per_page

    def metadata(self, lengths: StepLengths, pages: tuple[torch.Tensor, ...], backend: Any) -> AttentionMetadata:
        """pages: block table and slot mapping."""
        block_table, slot_mapping = pages
        return AttentionMetadata(
            backend=backend,
            block_table=block_table,
            slot_mapping=slot_mapping,
            window=self.window,
            chunked=self.is_chunked,
            **{one.name: getattr(lengths, one.name) for one in fields(StepLengths)},
        )

    def example_pages(
        self, tokens: ExampleTokens, num_pages: int, layout: GroupLayout, num_columns: int | None, *, writes: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Block table int32 [S, M] and slot mapping int64 [T]."""
        num_seqs, size = len(tokens.seq_lens), layout.tokens_per_page
        columns = -(-int(tokens.seq_lens.max()) // size)
        if not writes:
            return np.zeros((num_seqs, num_columns or columns), dtype=np.int32), np.full(len(tokens.positions_T), -1, dtype=np.int64)
        share = num_pages // num_seqs
        assert share >= columns, f"{num_seqs} sequences of up to {tokens.seq_lens.max()} tokens need more than {num_pages} pages"
        table = (np.arange(num_seqs)[:, None] * share + np.arange(columns)).astype(np.int32)
        pages = table[tokens.sequence_T, tokens.positions_T // size].astype(np.int64)
        return table, pages * size + tokens.positions_T % size


ALL_TOKENS = AllTokens()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWindow(AllTokens):
    """A token reads itself and the `size` - 1 tokens before it."""

    size: int

    @property
    def window(self) -> int:
        return self.size

    @property
    def features(self) -> frozenset[AttentionFeature]:
        return frozenset(("window",))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunks(TokenWindow):
    """A token reads only tokens of its own chunk of `size` tokens (Llama 4). Chunks start at multiples of `size`."""

    is_chunked: ClassVar[bool] = True

    @property
    def features(self) -> frozenset[AttentionFeature]:
        return frozenset(("chunks",))

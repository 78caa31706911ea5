"""The interface of a kind of state, and what a layer and a page of it hold.

Shape legend: S sequences, T tokens of the step, N pages, P tokens per page.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.state.metadata import StepLengths

EXAMPLE_PAGES, EXAMPLE_PAGE_TOKENS, EXAMPLE_SEQS = 8, 16, 2
COLUMNS = ".columns"  # behind a tensor's name: which pages of a slot hold it

ScoreFeature = Literal["soft_cap", "sinks", "alibi", "ahead"]
AttentionFeature = Literal["soft_cap", "sinks", "alibi", "ahead", "window", "chunks", "latent", "cross"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor that a layer keeps. dtype: None is the kind's choice (`StateKind.dtype_of`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class LayerState(ABC):
    """What one layer keeps.

    attention: what its op needs of an attention backend beyond causal softmax attention; None: the op is not one of attention.
    """

    attention: ClassVar[frozenset[AttentionFeature] | None] = None

    @abstractmethod
    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Its tensors, for one page of tokens or for one sequence. cache_dtype: of the KV cache."""

    def of_rank(self, mesh: Mesh) -> LayerState:
        """What one rank of the mesh keeps: all of it, unless a subclass says otherwise."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTensor:
    """A tensor's share of one page. shape, dtype: of the share. offset: bytes from the page's beginning."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLayout:
    """What lies where in a group's pages.

    tensors: by name, their share of a page. page_bytes: that a page must have. tokens_per_page: 0 where a page holds no tokens. Of slots:
    columns: which of its `pages_per_slot` pages hold a tensor. rows_per_page: of an encoder, where a page holds such.
    """

    tensors: Mapping[str, PlacedTensor]
    page_bytes: int
    tokens_per_page: int = 0
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pages_per_slot: int = 0
    rows_per_page: int = 0

    @property
    def num_example_pages(self) -> int:
        """Pages that hold the state of a few short sequences, while a graph is captured or verified; no piece sees it."""
        return max(EXAMPLE_PAGES, EXAMPLE_SEQS * self.pages_per_slot + 1)

    def column_tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """int32 [n]: the columns of each tensor, by the names of `StateGroup.tensor_names`."""
        return {name + COLUMNS: torch.tensor(one, dtype=torch.int32, device=device) for name, one in self.columns.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleTokens:
    """The tokens of a made-up step. positions_T, sequence_T: int64 [T], of each token. seq_lens: int32 [S]."""

    positions_T: np.ndarray
    sequence_T: np.ndarray
    seq_lens: np.ndarray


def one_behind_the_other(tensors: Mapping[str, StateTensor], tokens_per_page: int = 0) -> GroupLayout:
    """The layout of pages that hold one tensor behind the other."""
    placed: dict[str, PlacedTensor] = {}
    offset = 0
    for name, tensor in tensors.items():
        assert tensor.dtype is not None
        placed[name] = PlacedTensor(shape=tensor.shape, dtype=tensor.dtype, offset=offset)
        offset += placed[name].num_bytes
    return GroupLayout(tensors=placed, page_bytes=offset, tokens_per_page=tokens_per_page)


class StateKind(Protocol):
    """How the layers of a group keep state from step to step.

    unit: what the memory pool gives out: pages of tokens, a slot for each sequence, or pages of a request's items; "rows" lie
    beside it. window: only the last `window` tokens are read;
    None: any may be. is_shareable: other requests can take the state up where they have the same tokens before it.
    features: what it needs of an attention backend. Of slots: snapshots, rollback_tokens: as in `Recurrent`.
    """

    @property
    def unit(self) -> Literal["tokens", "slot", "rows", "items"]: ...

    @property
    def window(self) -> int | None: ...

    @property
    def is_shareable(self) -> bool: ...

    @property
    def features(self) -> frozenset[AttentionFeature]: ...

    @property
    def snapshots(self) -> bool: ...

    @property
    def rollback_tokens(self) -> int: ...

    def with_state_dtype(self, dtype: torch.dtype) -> StateKind:
        """The kind, with another dtype of recurrent state."""
        ...

    def dtype_of(self, tensor: StateTensor, cache_dtype: torch.dtype) -> torch.dtype:
        """The dtype of one of its tensors. cache_dtype: of the KV cache."""
        ...

    def can_roll_back(self, num_tokens: int) -> bool:
        """Whether a sequence can go on from a state as if its last `num_tokens` tokens had not been."""
        ...

    def covers(self, other: StateKind) -> bool:
        """Whether its pages hold every token that a layer of the kind `other` reads, so that both can use the same block table."""
        ...

    def layout(self, tensors: Mapping[str, StateTensor], tokens_per_page: int, page_bytes: int | None = None) -> GroupLayout:
        """The layout of pages of so many tokens. tensors: by name, for such a page, with their dtypes. page_bytes: of a page; None: as
        many as are needed at least.
        """
        ...

    def pages_of_request(self, layout: GroupLayout, max_model_len: int, max_step_tokens: int) -> int:
        """Pages that one request of the longest length holds at a time. max_step_tokens: of one step."""
        ...

    def bytes_read(self, name: str, layout: GroupLayout, num_tokens: int) -> int:
        """Bytes of a tensor that a decode reads for a sequence of `num_tokens` tokens."""
        ...

    def metadata(self, lengths: StepLengths, pages: tuple[torch.Tensor, ...], backend: Any) -> Any:
        """What the group's ops see of a step. pages: as `example_pages` gives them. backend: of an attention group."""
        ...

    def example_pages(self, tokens: ExampleTokens, num_pages: int, layout: GroupLayout, num_columns: int | None, *, writes: bool) -> Any:
        """Where the state of a made-up step's sequences lies, as numpy arrays: each has its own share of `num_pages` pages, in order.

        num_columns: of a block table; None: as few as the sequences need. writes: if False, the step changes no state.
        """
        ...


class BesideTokens:
    """What kinds of state have in common that steps of tokens do not change: `Rows` and `CrossAttention`."""

    __slots__ = ()
    window: ClassVar[int | None] = None
    is_shareable: ClassVar[bool] = True
    snapshots: ClassVar[bool] = False
    rollback_tokens: ClassVar[int] = 0

    def with_state_dtype(self, dtype: torch.dtype) -> Self:
        """It is not recurrent."""
        return self

    def dtype_of(self, tensor: StateTensor, cache_dtype: torch.dtype) -> torch.dtype:
        """The KV cache's, unless the tensor has its own."""
        return tensor.dtype or cache_dtype

    def can_roll_back(self, num_tokens: int) -> bool:
        """Tokens change nothing."""
        return True

    def covers(self, other: StateKind) -> bool:
        """It keeps no tokens."""
        return False

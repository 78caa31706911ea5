"""`StateGroup`: state of layers that are alike, as a model declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.state.kind import (
    COLUMNS,
    EXAMPLE_PAGE_TOKENS,
    AttentionFeature,
    GroupLayout,
    LayerState,
    ScoreFeature,
    StateKind,
    StateTensor,
)
from compile_and_serve.custom_ops.state.tokens import ALL_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class StateGroup:
    """State of layers that are alike, kept from step to step.

    name: of the model's argument: a list with one entry per layer, a tensor or (if a layer keeps several) a tuple of tensors. Of slots,
    the pair (tensor, columns) stands for each tensor (`Recurrent`). kind: how it is kept. scores: what the group's attention ops do to
    their scores. held: the layers whose state a stage of a pipeline keeps; None: all.
    """

    name: str
    layers: tuple[LayerState, ...]
    kind: StateKind = ALL_TOKENS
    scores: frozenset[ScoreFeature] = frozenset()
    held: tuple[int, ...] | None = None

    @property
    def is_attention(self) -> bool:
        """Whether the group's ops are `cas::attention` or `cas::mla_attention`, which need an attention backend."""
        return all(layer.attention is not None for layer in self.layers)

    @property
    def features(self) -> frozenset[AttentionFeature]:
        """What the group needs of an attention backend beyond causal softmax attention."""
        return self.scores.union(self.kind.features, *(layer.attention or () for layer in self.layers))

    def of_rank(self, mesh: Mesh) -> StateGroup:
        """What one rank of the mesh keeps."""
        return replace(self, layers=tuple(layer.of_rank(mesh) for layer in self.layers))

    def with_state_dtype(self, dtype: torch.dtype) -> StateGroup:
        """The group, with another dtype of recurrent state."""
        return replace(self, kind=self.kind.with_state_dtype(dtype))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """E.g. "kv_caches.3"; "states.3.1" where a layer keeps several. Of slots, "states.3.1.columns" too."""
        layout = self.layout(1, torch.float32)
        return *layout.tensors, *(name + COLUMNS for name in layout.columns)

    def layout(self, tokens_per_page: int, cache_dtype: torch.dtype) -> GroupLayout:
        """The layout of pages of so many tokens, as small as they may be. cache_dtype: of the KV cache."""
        return self.kind.layout(self._tensors(tokens_per_page, cache_dtype), tokens_per_page)

    def example_layout(self, cache_dtype: torch.dtype) -> GroupLayout:
        """The layout while a graph is captured or verified."""
        return self.layout(EXAMPLE_PAGE_TOKENS, cache_dtype)

    def layout_in(self, page_bytes: int, block_size: int, cache_dtype: torch.dtype) -> GroupLayout:
        """The layout of pages of so many bytes. A page of tokens holds as many blocks of `block_size` tokens as fit."""
        tokens = page_bytes // max(1, self.layout(block_size, cache_dtype).page_bytes) * block_size
        return self.kind.layout(self._tensors(tokens, cache_dtype), tokens, page_bytes)

    def held_layout(self, whole: GroupLayout, cache_dtype: torch.dtype, page_bytes: int | None = None) -> GroupLayout:
        """The layout of the held layers in pages of as many tokens as `whole`, the layout of all. page_bytes: of a page; None: as many as
        are needed.
        """
        assert self.held is not None
        tensors = self._tensors(whole.tokens_per_page or 1, cache_dtype, self.held)
        return self.kind.layout(tensors, whole.tokens_per_page, page_bytes)

    def bytes_read(self, num_tokens: int, cache_dtype: torch.dtype) -> dict[str, int]:
        """By tensor, the bytes that a decode reads for a sequence of `num_tokens` tokens."""
        layout = self.layout(1, cache_dtype)
        return {name: self.kind.bytes_read(name, layout, num_tokens) for name in layout.tensors}

    def argument(self, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        """The model's argument: one entry per layer. tensors: by name."""
        return [self._entry(tensors, self._names(index, len(layer.tensors(1, torch.float32)))) for index, layer in enumerate(self.layers)]

    def _entry(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Any:
        parts = [(tensors[name], tensors[name + COLUMNS]) if name + COLUMNS in tensors else tensors[name] for name in names]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _names(self, layer: int, count: int) -> list[str]:
        """Of a layer's `count` tensors."""
        name = f"{self.name}.{layer}"
        return [name] if count == 1 else [f"{name}.{part}" for part in range(count)]

    def _tensors(self, tokens_per_page: int, cache_dtype: torch.dtype, held: Sequence[int] | None = None) -> dict[str, StateTensor]:
        """By name. held: of these layers; None: of all."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            if held is not None and index not in held:
                continue
            parts = layer.tensors(tokens_per_page, cache_dtype)
            for name, tensor in zip(self._names(index, len(parts)), parts, strict=True):
                tensors[name] = replace(tensor, dtype=self.kind.dtype_of(tensor, cache_dtype))
        return tensors

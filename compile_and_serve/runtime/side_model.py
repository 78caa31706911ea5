"""`SideModel`: a second model beside the engine's, compiled and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.models.spec import ModelSpec


@dataclass(kw_only=True)
class SideModel:
    """spec: the rank's part. backends: by its attention groups. borrowed: its state group → the group of the engine's model whose block
    tables it uses. cache_dtype: of its keys and values. load: fills its weights.
    """

    spec: ModelSpec
    model: Model
    backends: Mapping[str, AttentionBackend]
    borrowed: Mapping[str, str]
    cache_dtype: torch.dtype
    load: Callable[[], None]

    def page_bytes(self, tokens_per_page: Mapping[str, int]) -> int:
        """Bytes that it keeps for each page of the engine's model. tokens_per_page: of that model's groups."""
        return sum(group.layout(tokens_per_page[self.borrowed[group.name]], self.cache_dtype).page_bytes for group in self.spec.state)

    def weight_memory(self) -> list[torch.Tensor]:
        """As of a model."""
        return self.model.weight_memory()

"""`CompiledDrafter`: a second model beside the target, compiled and loaded, whose cache lies under the target's block tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec


@dataclass(kw_only=True)
class CompiledDrafter:
    """drafter: with the rank's part of its state. backends: by its attention groups. borrowed: its state group → the target's group whose
    block tables it uses. extras: the tensors outside of the model, "fc.weight", "fc.bias" and "d2t". behind: the drafter's further
    layers, with the same backends. context: a block drafter's `DFlashContext`, over the same cache. load: fills all of it.
    """

    drafter: DrafterSpec
    model: Model
    backends: Mapping[str, AttentionBackend]
    borrowed: Mapping[str, str]
    cache_dtype: torch.dtype
    extras: Mapping[str, torch.Tensor]
    hidden_dtype: torch.dtype
    behind: tuple[CompiledDrafter, ...]
    context: CompiledDrafter | None
    load: Callable[[], None]

    def page_bytes(self, tokens_per_page: Mapping[str, int]) -> int:
        """Bytes of its own that it keeps for each page. tokens_per_page: of the target's groups."""
        own = sum(
            group.layout(tokens_per_page[self.borrowed[group.name]], self.cache_dtype).page_bytes for group in self.drafter.spec.state
        )
        hidden = self.drafter.hidden_size * self.hidden_dtype.itemsize  # of each page's last token: see `LaterLayers`
        return own + sum(hidden + one.page_bytes(tokens_per_page) for one in self.behind)

    def weight_memory(self) -> list[torch.Tensor]:
        """As of a model."""
        others = self.behind if self.context is None else (*self.behind, self.context)
        more = (tensor for one in others for tensor in one.weight_memory())
        return [*self.model.weight_memory(), *self.extras.values(), *more]

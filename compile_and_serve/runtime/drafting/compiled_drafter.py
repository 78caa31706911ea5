"""`CompiledDrafter`: the model that drafts, whose cache lies under the target's block tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.runtime.side_model import SideModel


@dataclass(kw_only=True)
class CompiledDrafter(SideModel):
    """extras: the tensors outside of the model, "fc.weight", "fc.bias" and "d2t". behind: the drafter's further layers, with the same
    backends. context: a block drafter's `DFlashContext`, over the same cache. load: fills all of it.
    """

    drafter: DrafterSpec
    extras: Mapping[str, torch.Tensor]
    hidden_dtype: torch.dtype
    behind: tuple[SideModel, ...]
    context: SideModel | None

    @property
    def others(self) -> tuple[SideModel, ...]:
        """`behind` and `context`."""
        return self.behind if self.context is None else (*self.behind, self.context)

    def page_bytes(self, tokens_per_page: Mapping[str, int]) -> int:
        """See `SideModel`."""
        hidden = self.drafter.hidden_size * self.hidden_dtype.itemsize  # of each page's last token: see `LaterLayers`
        return super().page_bytes(tokens_per_page) + sum(hidden + one.page_bytes(tokens_per_page) for one in self.behind)

    def weight_memory(self) -> list[torch.Tensor]:
        """See `SideModel`."""
        more = (tensor for one in self.others for tensor in one.weight_memory())
        return [*super().weight_memory(), *self.extras.values(), *more]

"""`PageMemory`: where the content of a rank's pages lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine process imports connectors, and no torch
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PageMemory:
    """parts: for each state group, tensors [N, …]. The rows p of all of them together are the content of page p of the group."""

    parts: Sequence[Sequence[torch.Tensor]]

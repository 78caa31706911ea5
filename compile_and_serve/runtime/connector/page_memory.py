"""`PageMemory`: where the content of a rank's pages lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine process imports connectors, and no torch
    import torch

_POISON = 0x47  # 51 015 in float32, 50 944 in bfloat16, 7.3 in float16, 71 in int8


@dataclass(frozen=True, kw_only=True, slots=True)
class PageMemory:
    """parts: for each state group, tensors [N, …]. The rows p of all of them together are the content of page p of the group."""

    parts: Sequence[Sequence[torch.Tensor]]

    def checksums(self, pages: Sequence[tuple[int, int]]) -> list[int]:
        """A number for the content of each (group, page). Waits for the device."""
        import torch

        sums = []
        for group, page in pages:
            total = torch.zeros((), dtype=torch.int64, device=self.parts[group][0].device)
            for part in self.parts[group]:
                content = part[page].contiguous().view(torch.uint8).flatten().to(torch.int64)
                places = torch.arange(1, 2 * len(content), 2, dtype=torch.int64, device=content.device)
                total = total * 1_000_003 + (content * places * (places + 12)).sum()  # wraps; a byte that moves changes it
            sums.append(total)
        found: list[int] = torch.stack(sums).tolist() if sums else []
        return found

    def poison(self, page_ids: Sequence[int]) -> None:
        """Fill pages, in every group, with numbers that show in any result that reads them. They are finite, because masked values may be
        multiplied by 0.
        """
        import torch  # ranks alone call this

        for parts in self.parts:
            for part in parts:
                part.view(torch.uint8)[list(page_ids)] = _POISON

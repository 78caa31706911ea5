"""`PageMemory`: where the content of a rank's pages lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the engine process imports connectors, and no torch
    import torch

_POISON = 0x47  # 51 015 in float32, 50 944 in bfloat16, 7.3 in float16, 71 in int8


class PagePiece(msgspec.Struct, array_like=True, frozen=True):
    """A tensor's share of a page: bytes [outer, heads, head_bytes] from `offset` on. whole_heads: of all ranks together. Where ranks are
    more than heads, several keep the same one.
    """

    offset: int
    outer: int
    heads: int
    whole_heads: int
    head_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageMemory:
    """parts: for each state group, tensors [N, …]. The rows p of all of them together are the content of page p of the group.
    pieces: what a page of each group holds; None: only equal ranks understand it.
    """

    parts: Sequence[Sequence[torch.Tensor]]
    pieces: Sequence[Sequence[PagePiece] | None] = ()

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


def part_as_bytes(part: torch.Tensor) -> torch.Tensor:
    """A part as uint8 [N, bytes of a page's row]: the same memory."""
    import torch

    if part.dtype == torch.uint8 and part.dim() == 2:
        return part
    assert part.is_contiguous(), "the rows of a part are contiguous, or bytes"
    return part.view(part.shape[0], -1).view(torch.uint8)

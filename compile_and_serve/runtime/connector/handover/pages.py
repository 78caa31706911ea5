"""The pages of a rank as bytes: whole, or some heads of each of their tensors.

Shape legend: N pages of the pool, n pages of a transfer, B bytes of a page, b bytes of it that are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import Platform, SideStream
from compile_and_serve.runtime.connector.handover.wire import MAX_CHUNK_BYTES, GroupInfo, RankInfo, TransferError
from compile_and_serve.runtime.connector.page_memory import PageMemory, PagePiece, part_as_bytes

Heads = Sequence[tuple[int, int]]  # of each piece: the first, and the end


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What a rank fetches from another engine's rank: these heads of each of that rank's pieces, to these of its own; None: whole pages."""

    rank: RankInfo
    theirs: Heads | None = None
    mine: Heads | None = None


class PageBytes:
    """The pages of all groups. Calls may come from any thread; the pages that they name are not touched by anybody else."""

    def __init__(self, memory: PageMemory) -> None:
        self.parts = [[part_as_bytes(part) for part in parts] for parts in memory.parts]
        self._pieces = list(memory.pieces) or [None] * len(self.parts)
        device = next((part.device for parts in self.parts for part in parts), torch.device("cpu"))
        self.platform: Platform = platform_of(device)

    @property
    def groups(self) -> list[GroupInfo]:
        """As other ranks are told."""
        return [
            GroupInfo(sum(part.shape[1] for part in parts), None if pieces is None else list(pieces))
            for parts, pieces in zip(self.parts, self._pieces, strict=True)
        ]

    def stream(self) -> SideStream | None:
        """Of the calling thread, for `read` and `write`."""
        self.platform.make_current()
        return self.platform.side_stream()

    def row_bytes(self, group: int, heads: Heads | None) -> int:
        """b."""
        if heads is None:
            return sum(part.shape[1] for part in self.parts[group])
        return sum(piece.outer * (end - first) * piece.head_bytes for piece, (first, end) in zip(self._known(group), heads, strict=True))

    def read(self, group: int, pages: Sequence[int], heads: Heads | None, stream: SideStream | None) -> np.ndarray:
        """uint8 [n, b] on the host."""
        if self.platform.shares_host_memory:
            rows = self._rows_on_host(group, pages)
            return rows if heads is None else np.concatenate([view.reshape(len(rows), -1) for view in self._views(rows, group, heads)], 1)
        index = torch.tensor(pages, device=self.platform.device)
        with stream.running() if stream is not None else nullcontext():
            parts = [part.index_select(0, index) for part in self.parts[group]]
            found = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            if heads is not None:
                found = torch.cat([view.reshape(len(pages), -1) for view in self._views(found, group, heads)], 1)
            on_host = torch.empty(found.shape, dtype=torch.uint8, pin_memory=True)
            on_host.copy_(found, non_blocking=True)
            self.platform.record_timed_event().synchronize()
        return on_host.numpy()

    def write(self, group: int, pages: Sequence[int], heads: Heads | None, content: np.ndarray, stream: SideStream | None) -> None:
        """content: uint8 [n, b] on the host. It is in the pages when this returns."""
        if self.platform.shares_host_memory:
            if heads is not None:
                rows = self._rows_on_host(group, pages)
                self._fill(rows, group, heads, content)
                content = rows
            begin = 0
            for part in self.parts[group]:
                part.numpy()[list(pages)] = content[:, begin : begin + part.shape[1]]
                begin += part.shape[1]
            return
        index = torch.tensor(pages, device=self.platform.device)
        with stream.running() if stream is not None else nullcontext():
            pinned = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            pinned.numpy()[:] = content
            on_device = pinned.to(self.platform.device, non_blocking=True)
            if heads is not None:
                kept = torch.cat([part.index_select(0, index) for part in self.parts[group]], 1)
                self._fill(kept, group, heads, on_device)
                on_device = kept
            begin = 0
            for part in self.parts[group]:
                part.index_copy_(0, index, on_device[:, begin : begin + part.shape[1]])
                begin += part.shape[1]
            self.platform.record_timed_event().synchronize()

    def _rows_on_host(self, group: int, pages: Sequence[int]) -> np.ndarray:
        parts = [part.numpy()[list(pages)] for part in self.parts[group]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    def _known(self, group: int) -> Sequence[PagePiece]:
        pieces = self._pieces[group]
        assert pieces is not None, "it is not known what the pages hold"
        return pieces

    def _views(self, rows: Any, group: int, heads: Heads) -> Iterator[Any]:
        """Of whole pages [n, B], on the host or the device, each piece's heads: [n, outer, heads, head_bytes], views."""
        for piece, (first, end) in zip(self._known(group), heads, strict=True):
            size = piece.outer * piece.heads * piece.head_bytes
            whole = rows[:, piece.offset : piece.offset + size].reshape(len(rows), piece.outer, piece.heads, piece.head_bytes)
            yield whole[:, :, first:end]

    def _fill(self, rows: Any, group: int, heads: Heads, content: Any) -> None:
        """Put [n, b] into the heads' places of whole pages [n, B]."""
        begin = 0
        for piece, (first, end) in zip(self._known(group), heads, strict=True):
            size = piece.outer * (end - first) * piece.head_bytes
            part = content[:, begin : begin + size].reshape(len(rows), piece.outer, end - first, piece.head_bytes)
            for outer in range(piece.outer):
                place = piece.offset + (outer * piece.heads + first) * piece.head_bytes
                length = (end - first) * piece.head_bytes
                rows[:, place : place + length] = part[:, outer].reshape(len(rows), length)
            begin += size


def plan_pulls(group: int, mine: RankInfo, ranks: Sequence[RankInfo]) -> list[PullPlan]:
    """Whom a rank asks for the pages of a group, and for which heads. Raises `TransferError` if the layouts do not fit."""
    same = ranks[mine.rank] if len(ranks) == mine.num_ranks else None
    if same is not None and same.groups[group].row_bytes == mine.groups[group].row_bytes:
        return [PullPlan(same)]
    own = mine.groups[group].pieces
    others = [rank.groups[group].pieces for rank in ranks]
    if own is None or any(pieces is None for pieces in others):
        raise TransferError(
            f"The other engine has {len(ranks)} ranks and this one {mine.num_ranks}: state group {group} can only be handed over between "
            "engines with as many ranks."
        )
    shapes = [[(piece.outer, piece.whole_heads, piece.head_bytes) for piece in pieces or ()] for pieces in (own, *others)]
    if any(shape != shapes[0] for shape in shapes):
        raise TransferError(f"The pages of state group {group} are laid out in another way in the other engine.")
    plans = []
    left = [set(range(*_range(piece, mine))) for piece in own]
    for rank, pieces in zip(ranks, others, strict=True):
        theirs, into = [], []
        for piece, other, missing in zip(own, pieces or (), left, strict=True):
            (my_first, _), (first, end) = _range(piece, mine), _range(other, rank)
            found = sorted(missing.intersection(range(first, end)))
            missing.difference_update(found)
            begin, stop = (found[0], found[-1] + 1) if found else (first, first)
            theirs.append((begin - first, stop - first))
            into.append((begin - my_first, stop - my_first) if found else (0, 0))
        if any(begin < stop for begin, stop in theirs):
            plans.append(PullPlan(rank, theirs, into))
    assert not any(left), "the other engine's ranks have all heads"
    return plans


def _range(piece: PagePiece, rank: RankInfo) -> tuple[int, int]:
    """The heads, of all, that a rank keeps: the first, and the end."""
    first = 0 if piece.heads == piece.whole_heads else rank.rank * piece.whole_heads // rank.num_ranks
    return first, first + piece.heads


def rows_of_chunk(row_bytes: int) -> int:
    """Pages that are gathered and sent together."""
    return max(1, MAX_CHUNK_BYTES // max(1, row_bytes))

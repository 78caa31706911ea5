"""What becomes of an image or a video, and how it takes its place in a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from compile_and_serve.custom_ops.step_data import CROSS_SPANS_ARRAY, MediaItem, StepArray
from compile_and_serve.models.vision.names import POSITION_ARRAY

MediaKind = Literal["image", "video", "audio"]


class MediaError(ValueError):
    """Media that cannot be used. The message is one sentence for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedItem:
    """Tokens of which the encoder computes the rows: an image, or two frames of a video.

    offset: its first token in the tokens of the whole. arrays: of the encoder, a row for each token. time, height, width: of three-row
    positions: tokens lie row by row in a grid. advance: what the positions gain behind it; None: the larger side of the grid. relative:
    int32 [length, 3]: positions from 0 on, in place of those of a grid. is_beside: its rows are read by cross-attention, from the token at
    `offset` on, and it has no other token.
    """

    offset: int
    length: int
    arrays: Mapping[str, StepArray]
    time: int = 0
    height: int = 1
    width: int = 1
    advance: int | None = None
    relative: np.ndarray | None = None
    is_beside: bool = False

    def positions(self, start: int) -> tuple[np.ndarray, int]:
        """Where the first token has position `start`: int32 [length + 1, 3], and the position behind the item, which is the last row."""
        end = start + (max(self.height, self.width) if self.advance is None else self.advance)
        rows = np.empty((self.length + 1, 3), dtype=np.int32)
        rows[-1] = end
        if self.relative is not None:
            rows[:-1] = start + self.relative
            return rows, end
        rows[:-1, 0] = start + self.time
        rows[:-1, 1] = start + np.repeat(np.arange(self.height, dtype=np.int32), self.width)
        rows[:-1, 2] = start + np.tile(np.arange(self.width, dtype=np.int32), self.height)
        return rows, end


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedMedia:
    """key: of the content and of how it was processed. tokens: what takes the placeholder's place. items: in order. around: tokens that go
    with the placeholder, where they stand before and behind it.
    """

    kind: MediaKind
    key: bytes
    tokens: Sequence[int]
    items: Sequence[PreparedItem] = field(default_factory=list)
    around: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Of the arrays."""
        return sum(len(array.data) for item in self.items for array in item.arrays.values())


def content_key(*parts: bytes | memoryview | str) -> bytes:
    """sha256 of the parts, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def place_media(
    prompt: Sequence[int], media: Sequence[PreparedMedia], placeholders: Mapping[int, MediaKind], *, three_rows: bool
) -> tuple[list[int], list[MediaItem]]:
    """The prompt with the media's tokens in place of their placeholders, and the items for the engine.

    placeholders: token → the kind of media that it stands for. Media of a kind are in the order of the prompt. three_rows: the
    model's positions have three rows. Raises `MediaError` if there are more or fewer placeholders than media.
    """
    prompt = list(prompt)
    ids: list[int] = []
    items: list[MediaItem] = []
    beside: list[tuple[int, bytes, PreparedItem]] = []
    left: dict[MediaKind, list[PreparedMedia]] = {}
    for one in reversed(media):
        left.setdefault(one.kind, []).append(one)
    position = 0  # of the next token, in rows of positions
    skipped = -1
    for index, token in enumerate(prompt):
        if index == skipped:
            continue
        kind = placeholders.get(token)
        if kind is None:
            ids.append(token)
            position += 1
            continue
        if not left.get(kind):
            raise MediaError(f"The prompt has {_counts(prompt, placeholders)}, but the request has {_given(media, placeholders)}.")
        one = left[kind].pop()
        if one.around is not None and (ids[-1:], prompt[index + 1 : index + 2]) == ([one.around[0]], [one.around[1]]):
            del ids[-1]
            position, skipped = position - 1, index + 1
        begin, done = len(ids), 0
        ids += one.tokens
        beside += [(begin + item.offset, one.key, item) for item in one.items if item.is_beside]
        for number, item in enumerate(item for item in one.items if not item.is_beside):
            position += item.offset - done
            start = begin + item.offset
            arrays = {name: msgspec.structs.replace(array, start=start) for name, array in item.arrays.items()}
            if three_rows:
                rows, position = item.positions(position)
                arrays[POSITION_ARRAY] = StepArray.of(rows, start=start)
            else:
                position += item.length
            done = item.offset + item.length
            key = one.key if len(one.items) == 1 else content_key(one.key, str(number))
            items.append(MediaItem(key=key, position=start, length=item.length, arrays=arrays))
        position += len(one.tokens) - done
    if any(left.values()):
        raise MediaError(f"The prompt has {_counts(prompt, placeholders)}, but the request has {_given(media, placeholders)}.")
    return ids, items + _beside_items(beside)


def _beside_items(found: Sequence[tuple[int, bytes, PreparedItem]]) -> list[MediaItem]:
    """Items beside a prompt, by the tokens from which on they are read. Those without text between them are one, which grows."""
    runs: list[list[tuple[int, bytes, PreparedItem]]] = []
    for one in found:
        if runs and runs[-1][-1][0] == one[0] - 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    items = []
    for run in runs:
        position = run[0][0]
        rows_T = np.cumsum([item.length for _, _, item in run])
        spans_T2 = np.stack((np.zeros_like(rows_T), rows_T), axis=1).astype(np.int32)
        arrays = dict(run[0][2].arrays)
        if len(run) > 1:
            from compile_and_serve.models.vision.whole_items import joined  # imports torch

            arrays = {name: joined([item.arrays[name] for _, _, item in run]) for name in arrays}
        arrays = {name: msgspec.structs.replace(array, start=position) for name, array in arrays.items()}
        arrays[CROSS_SPANS_ARRAY] = StepArray.of(spans_T2, start=position)
        key = run[0][1] if len(run) == 1 else content_key(*(key for _, key, _ in run))
        items.append(MediaItem(key=key, position=position, length=int(rows_T[-1]), arrays=arrays, is_beside=True))
    return items


def _counts(prompt: Sequence[int], placeholders: Mapping[int, MediaKind]) -> str:
    return f"placeholders of {_numbers([placeholders[token] for token in prompt if token in placeholders], placeholders)}"


def _given(media: Sequence[PreparedMedia], placeholders: Mapping[int, MediaKind]) -> str:
    return _numbers([one.kind for one in media], placeholders)


def _numbers(kinds: Sequence[MediaKind], placeholders: Mapping[int, MediaKind]) -> str:
    known = sorted({*placeholders.values(), *kinds} | ({"video"} if "image" in placeholders.values() else set()))
    return " and ".join(f"{kinds.count(kind)} {kind}s" for kind in known)

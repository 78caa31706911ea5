"""Which media items are encoded in a step, and where their rows lie.

A chunk of a prompt can be computed once the rows of all media in it are there. They are computed in the same step, before the model runs,
within a budget of encoder tokens. A chunk ends before an item whose rows the step cannot compute any more.

The rows of an item lie in pages of a region of their own, under a key of the item's content. A request holds them until its tokens that
read them are computed. Then they stay until others need the room: the least recently used go first. So requests share the rows of
equal items, and one that was preempted finds its own again.

The first request in order can always go on. It needs one item at a time, and no item after it takes room before it. Those that hold rows
need nothing more to read them, and then give them back.

Steps run in order on one stream, so rows that are given back after a step may be overwritten by the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from compile_and_serve.custom_ops.step_data import MediaItem, PromptContents
from compile_and_serve.runtime.scheduler.block_pool import BlockPool
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem, EncoderInfo


class EncoderCache:
    """Each step: `begin_step`, `has_room` and `take` for each chunk, `end_step`.

    arrays: of media, which the encoder reads. num_encoded: items that were computed, since the start.
    """

    def __init__(self, info: EncoderInfo) -> None:
        self.info = info
        self.pool = BlockPool(info.num_pages)
        self.num_encoded = 0
        self.arrays = frozenset({*info.arrays, *([info.embedded] if info.embedded else [])})
        self._budget = info.max_tokens
        self._is_full = False  # an item found no room in this step: no later one takes what it waits for
        self._held: dict[str, dict[int, list[int]]] = {}  # request → position of an item → its pages
        self._passed: list[list[int]] = []  # pages whose last reader is in this step
        self._items: list[EncodeItem] = []  # of this step

    def check(self, contents: PromptContents | None) -> None:
        """Raise `ValueError` with one sentence for media that cannot be encoded."""
        if contents is None:
            return
        for name in contents.arrays:
            if name in self.arrays:
                raise ValueError(f"The array {name!r} must come with a media item: the model's encoder reads it.")
        for item in contents.media:
            given = self.arrays & item.arrays.keys()
            if given and item.is_beside != self.info.fills_items:
                where = "beside the prompt" if self.info.fills_items else "at tokens of the prompt"
                raise ValueError(f"The media item at token {item.position} must stand {where}: so this model reads it.")
            if not given:
                continue
            if given == {self.info.embedded}:
                pass
            elif self.info.embedded in given:
                raise ValueError(f"The media item at token {item.position} comes with its rows: it can have nothing else.")
            elif missing := frozenset(self.info.arrays) - given:
                raise ValueError(f"The media item at token {item.position} lacks the array {min(missing)!r}, which the encoder reads.")
            if item.length > self.info.max_item_tokens:
                raise ValueError(
                    f"The media item at token {item.position} has {item.length} tokens, but the encoder reads {self.info.max_item_tokens} "
                    "at most: make it smaller."
                )
            for name in given:
                array = item.arrays[name]
                num_rows = 1 if name in self.info.whole_arrays else item.length
                if (array.start, array.end) != (item.position, item.position + num_rows):
                    raise ValueError(
                        f"The array {name!r} of the media item at token {item.position} must have a row for each of its tokens."
                    )

        if self.info.whole_prompts and (most := self._num_encoded(contents.media)) > self.info.max_tokens:
            raise ValueError(
                f"The prompt's media have {most} tokens, but this model computes a prompt in one step, which encodes at most "
                f"{self.info.max_tokens}: give fewer, or raise --max-encoder-tokens."
            )

    def begin_step(self) -> None:
        """The budget of a step is whole again."""
        self._budget, self._is_full = self.info.max_tokens, False

    def has_room(self, request: Request, start: int, budget: int) -> bool:
        """Whether a chunk of the request's prompt that begins at token `start` can have any token in this step.

        budget: tokens that it may have at most.
        """
        if self.info.whole_prompts:
            items = list(self._unread(request, start))
            pages = sum(self._num_pages(item) for item in items)
            self._is_full |= self._num_encoded(items) > self._budget or pages > self.pool.num_free
            return not items or not self._is_full
        item = next(self._unread(request, start), None)
        if item is None or item.position > start:
            return True
        return not self._cuts(item, start + budget) and self._is_available(request, item)

    def take(self, request: Request, start: int, end: int) -> int:
        """Hold the rows that tokens `start` … `end` - 1 of the request read, as far as the step can have them. → where the chunk ends"""
        for item in self._unread(request, start):
            if item.position >= end:
                break
            if self._cuts(item, end) or not self._is_available(request, item):
                end = max(start, item.position)
                break
            self._hold(request, item)
        held = self._held.get(request.request_id)
        for item in self._unread(request, start) if held else ():
            if item.position + item.length > end:
                break
            self._passed.append(held.pop(item.position))  # type: ignore[union-attr]
        if held is not None and not held:
            del self._held[request.request_id]
        return end

    def end_step(self) -> list[EncodeItem]:
        """What requests read from this step on."""
        for pages in self._passed:
            self.pool.free(pages)
        items, self._items, self._passed = self._items, [], []
        return items

    def release(self, request: Request) -> None:
        """The request has lost its place, or ended."""
        for pages in self._held.pop(request.request_id, {}).values():
            self.pool.free(pages)

    def forget(self) -> None:
        """Forget all rows. No request may hold any."""
        forgotten = self.pool.uncache_all()
        assert forgotten, "a request holds rows of the encoder"

    def _unread(self, request: Request, start: int) -> Iterator[MediaItem]:
        """The items with tokens from `start` on that the encoder reads, in order."""
        contents = request.prompt.contents
        for item in () if contents is None else contents.media:
            if item.position + item.length > start and not self.arrays.isdisjoint(item.arrays):
                yield item

    def _cuts(self, item: MediaItem, end: int) -> bool:
        """Whether no chunk may end at token `end`, because that is in the item."""
        return self.info.is_whole and end < item.position + item.length

    def _is_available(self, request: Request, item: MediaItem) -> bool:
        if item.position in self._held.get(request.request_id, ()) or _key(request, item) in self.pool.cached:
            return True
        self._is_full |= item.length + self.info.leading_rows > self._budget or self._num_pages(item) > self.pool.num_free
        return not self._is_full

    def _num_encoded(self, items: Iterable[MediaItem]) -> int:
        """Tokens that the encoder reads for items none of which is there."""
        return sum(item.length + self.info.leading_rows for item in items)

    def _num_pages(self, item: MediaItem) -> int:
        return -(-item.length // self.info.rows_per_page)

    def _hold(self, request: Request, item: MediaItem) -> None:
        held = self._held.setdefault(request.request_id, {})
        if item.position in held:
            return
        key, arrays = _key(request, item), {}
        first = self.pool.cached.get(key)
        if first is not None:
            blocks = (first, *first.followers)
            self.pool.share(blocks)
            pages = [block.block_id for block in blocks]
        else:
            pages = self.pool.allocate(self._num_pages(item))
            self.pool.cache_together(pages, key, 0)
            self._budget -= item.length + self.info.leading_rows
            self.num_encoded += 1
            given = {name: array for name, array in item.arrays.items() if name in self.arrays}
            arrays = {name: msgspec.structs.replace(array, start=array.start - item.position) for name, array in given.items()}
        held[item.position] = pages
        one = EncodeItem(request_id=request.request_id, position=item.position, length=item.length, page_ids=pages, arrays=arrays)
        self._items.append(one)


def _key(request: Request, item: MediaItem) -> bytes:
    """Requests of different salts share nothing."""
    return request.prompt.salt + item.key

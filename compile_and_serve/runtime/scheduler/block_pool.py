"""The blocks of the KV cache: how many hold each, what it contains, which is evicted next. Every operation is O(1) per
block.

A block is *used* (ref_count > 0), *pinned* (pins > 0: something other than a request reads or writes it), or *free* and in the
free queue. A block that no request uses may still be cached: its content stays findable by key until the block is handed out
again. Blocks without content are handed out first, then the content that is worth least (`FreeBlockQueue`).

Several blocks may be cached as one entry (a snapshot of recurrent state). Its key finds the first; the others follow it.
They are shared together, and freed together in their order, so they lie behind the first in the queue. When the first is
handed out, the entry is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import frexp

from compile_and_serve.runtime.scheduler.event_recorder import EventRecorder

POISON_VARIABLE = "COMPILE_AND_SERVE_POISON_BLOCKS"  # set in tests: blocks that lose their content are filled with what must not be read
MAX_EVICTED_KEYS = 1 << 15
COMPUTED = -1  # `KVCacheBlock.step` of content that was computed before it was cached


class KVCacheBlock:
    """One block. key: names its content (runtime/scheduler/prefix_keys.py), None when it is not cached. step: number of the step
    that computes the content; later steps may read it. followers: of the first block of an entry, the others; they have its key.
    ref_count: requests that use the block. pins: holds of others. It is free while both are 0.
    worth: tokens that would be computed again without the content, for each of its blocks; in tokens of a block of keys and values.
    Of free blocks: lane, due: of `FreeBlockQueue`.
    """

    __slots__ = ("block_id", "due", "followers", "key", "lane", "next", "pins", "prev", "ref_count", "step", "worth")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.pins = 0
        self.key: bytes | None = None
        self.step = COMPUTED
        self.followers: tuple[KVCacheBlock, ...] = ()
        self.worth = 1.0
        self.due = 0.0
        self.lane: _Lane | None = None
        self.prev: KVCacheBlock = self
        self.next: KVCacheBlock = self

    @property
    def is_free(self) -> bool:
        """Whether the block may be handed out."""
        return not self.ref_count and not self.pins


class _Lane:
    """A doubly linked list of blocks, through the blocks themselves. A sentinel joins its ends. worth: of its blocks."""

    __slots__ = ("length", "sentinel", "worth")

    def __init__(self, worth: float) -> None:
        self.sentinel = KVCacheBlock(-1)
        self.sentinel.lane = self
        self.length = 0
        self.worth = worth

    def insert(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        after = before.next
        before.next = after.prev = block
        block.prev, block.next = before, after
        block.lane = self
        self.length += 1

    def pop_left(self, count: int) -> list[KVCacheBlock]:
        """Take blocks at the head; there are as many."""
        following, blocks = self.sentinel.next, []
        for _ in range(count):
            blocks.append(following)
            following.lane = None
            following = following.next
        self.sentinel.next, following.prev = following, self.sentinel
        self.length -= count
        return blocks


class FreeBlockQueue:
    """`length` blocks in the order in which they are handed out: those without content, then content by worth and recency.

    Content is due at the time when it was freed plus its worth, and the earliest is handed out first. Time is what was due when content
    was last handed out (the GreedyDual rule). So between contents of one worth the least recently used goes first. What is worth k times
    as much stays while the rest is replaced k times, and what is worth next to nothing goes before all that was freed at its time. A lane
    has contents of about one worth, in the order in which they are due.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._empty = _Lane(0.0)
        self._common = _Lane(1.0)
        self._lanes: dict[float, _Lane] = {1.0: self._common}
        self._time = 0.0
        self.length = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Put in a block with content: of blocks of its worth it is handed out last."""
        lane = self._common if block.worth == 1.0 else self._lane(block.worth)
        block.due = self._time + lane.worth
        lane.insert(lane.sentinel.prev, block)
        self.length += 1

    def append_left(self, block: KVCacheBlock) -> None:
        """Put in a block that is handed out next."""
        self._empty.insert(self._empty.sentinel, block)
        self.length += 1

    def pop_left(self, count: int) -> list[KVCacheBlock]:
        """Take the next `count` blocks; none where count is negative. The queue must have as many."""
        assert count <= self.length, f"{count} blocks wanted, {self.length} free"
        if count <= 0:
            return []
        empty = self._empty
        blocks = empty.pop_left(min(count, empty.length))
        while len(blocks) < count:
            lane = min((lane for lane in self._lanes.values() if lane.length), key=_next_due)
            # A lane alone is not compared with others for each block. Of an entry, what follows the first becomes empty.
            is_alone = lane is self._common and lane.length == self.length - len(blocks)
            taken = lane.pop_left(min(count - len(blocks), lane.length) if is_alone else self._length_of_first(lane, count - len(blocks)))
            self._time = taken[-1].due
            blocks += taken
        self.length -= len(blocks)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it lies."""
        assert block.lane is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.lane.length -= 1
        block.lane = None
        self.length -= 1

    def in_order(self) -> Iterator[KVCacheBlock]:
        """The blocks in the order in which they are handed out. Those that were yielded may be removed meanwhile, with their followers."""
        yield from self._in_order_of([self._empty])
        yield from self._in_order_of([lane for lane in self._lanes.values() if lane.length])

    def block_ids(self) -> list[int]:
        """Ids in that order. O(length): for tests and debugging."""
        return [block.block_id for block in self.in_order()]

    def _in_order_of(self, lanes: Sequence[_Lane]) -> Iterator[KVCacheBlock]:
        heads = {lane: lane.sentinel.next for lane in lanes}
        last: _Lane | None = None
        while True:
            for lane in lanes:
                while heads[lane].lane is not lane:  # it was removed
                    heads[lane] = heads[lane].next
            left = [lane for lane in lanes if heads[lane] is not lane.sentinel]
            if not left:
                return
            last = min(left, key=lambda lane: (heads[lane].due, lane is not last))
            block = heads[last]
            heads[last] = block.next
            yield block

    def _lane(self, worth: float) -> _Lane:
        """The lane of blocks worth from 1 to 2 times its worth."""
        rounded = 2.0 ** (frexp(worth)[1] - 1)
        if rounded not in self._lanes:
            self._lanes[rounded] = _Lane(rounded)
        return self._lanes[rounded]

    @staticmethod
    def _length_of_first(lane: _Lane, most: int) -> int:
        """Blocks of the entry at the head, `most` at most."""
        return min(most, 1 + len(lane.sentinel.next.followers))


def _next_due(lane: _Lane) -> float:
    return lane.sentinel.next.due


class BlockPool:
    """`num_blocks` blocks with reference counts, all free at first, and the map from key to cached block.

    on_evict: called before cached content is handed out, with the first block of its entry. It may pin the entry's blocks and return
    True: then others are handed out. It must leave as many free blocks as the caller of `allocate` wants.
    events: what is told of content that becomes findable or is forgotten; None: nothing.
    evicted: keys of the content that was handed out last, and when (time.monotonic()), the oldest first.
    num_pinned: blocks that are pinned and that no request uses. emptied: blocks that lost their content or had none when they were handed
    out, since `take_emptied`; None: nobody asks (POISON_VARIABLE).
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.cached: dict[bytes, KVCacheBlock] = {}
        self.on_evict: Callable[[KVCacheBlock], bool] | None = None
        self.events: EventRecorder | None = None
        self.num_pinned = 0
        self.evicted: dict[bytes, float] = {}
        self.emptied: list[int] | None = [] if os.environ.get(POISON_VARIABLE) else None

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, free cached ones among them."""
        return self.free_queue.length

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks (none if it is negative) with reference count 1. The caller has checked `num_free`. Their content
        is forgotten.
        """
        if self.on_evict is not None:
            self._keep_evicted(self.on_evict, count)
        block_ids = []
        for block in self.free_queue.pop_left(count):
            if block.key is not None:
                self.evicted[block.key] = time.monotonic()
                self._forget(block)
            block.ref_count = 1
            block_ids.append(block.block_id)
        while len(self.evicted) > MAX_EVICTED_KEYS:
            del self.evicted[next(iter(self.evicted))]
        if self.emptied is not None:
            self.emptied += block_ids
        return block_ids

    def take_emptied(self) -> list[int]:
        """The blocks to be filled with poison before the next step: none of them is read before it is written."""
        emptied, self.emptied = self.emptied or [], None if self.emptied is None else []
        return emptied

    def share(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each cached block, to all of an entry. Those that were free leave the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                if block.pins:
                    self.num_pinned -= 1
                else:
                    self.free_queue.remove(block)
            block.ref_count += 1

    def _keep_evicted(self, on_evict: Callable[[KVCacheBlock], bool], count: int) -> None:
        """Ask `on_evict` about the cached content of the next `count` blocks."""
        seen = 0
        if count <= 0:
            return
        for block in self.free_queue.in_order():
            if block.key is None or self.cached.get(block.key) is not block or not on_evict(block):
                seen += 1
            else:
                entry = (block, *block.followers)
                assert all(one.pins for one in entry), f"the content of block {block.block_id} was kept, but not pinned"
            if seen == count:
                return

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block. The first ones are evicted first: give the last block of a sequence first, but those of an
        entry in their order.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.pins:
                    self.num_pinned += 1
                elif block.key is None:
                    self.free_queue.append_left(block)
                    if self.emptied is not None:
                        self.emptied.append(block_id)
                else:
                    self.free_queue.append(block)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Keep blocks from being handed out until they are unpinned as often, whoever uses them. Pin all blocks of an entry."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0 and block.pins == 0:
                self.free_queue.remove(block)
                self.num_pinned += 1
            block.pins += 1

    def unpin(self, block_ids: Sequence[int], *, evict_next: bool = False) -> None:
        """Undo `pin`. Order as of `free`. evict_next: cached blocks that become free are evicted before all others, not after them."""
        for block_id in reversed(block_ids) if evict_next else block_ids:
            block = self.blocks[block_id]
            assert block.pins > 0, f"block {block_id} is unpinned twice"
            block.pins -= 1
            if block.pins == 0 and block.ref_count == 0:
                self.num_pinned -= 1
                if evict_next or block.key is None:
                    self.free_queue.append_left(block)
                else:
                    self.free_queue.append(block)

    def cache(self, block_id: int, key: bytes, step: int = COMPUTED) -> None:
        """Make the content of a block that is not free findable, unless another block has the same: such blocks are not merged."""
        block = self.blocks[block_id]
        assert block.ref_count or block.pins, f"block {block_id} is free"
        assert block.key is None, f"block {block_id} is cached already"
        if key not in self.cached:
            self.cached[key] = block
            block.key = key
            block.step = step
            block.worth = 1.0

    def cache_together(self, block_ids: Sequence[int], key: bytes, step: int, worth: float = 1.0) -> None:
        """Make blocks that are not free findable as one entry, unless there is one with that key. worth: of each block."""
        if key not in self.cached:
            first, *others = (self.blocks[block_id] for block_id in block_ids)
            self.cache(block_ids[0], key, step)
            first.followers = tuple(others)
            first.worth = worth
            for block in others:
                assert block.ref_count or block.pins, f"block {block.block_id} is free"
                assert block.key is None, f"block {block.block_id} is cached already"
                block.key = key
                block.worth = worth

    def entry(self, key: bytes) -> tuple[KVCacheBlock, ...]:
        """All blocks that are cached under the key."""
        first = self.cached[key]
        return (first, *first.followers)

    def uncache(self, key: bytes) -> None:
        """Forget the content that has the key."""
        self._forget(self.cached[key])

    def uncache_all(self) -> bool:
        """Forget all content. Returns False, and does nothing, while any block is used. Pinned blocks stay pinned."""
        if self.num_free + self.num_pinned != self.num_blocks:
            return False
        events, self.events = self.events, None
        for block in list(self.cached.values()):
            self._forget(block)
        if events is not None:
            self.events = events
            events.cleared()
        return True

    def _forget(self, first: KVCacheBlock) -> None:
        assert first.key is not None
        del self.cached[first.key]
        if self.events is not None:
            self.events.removed(first.key)
        first.key = None
        if first.followers:
            for block in reversed(first.followers):
                block.key = None
                if block.lane is not None:  # nothing is lost with it any more
                    self.free_queue.remove(block)
                    self.free_queue.append_left(block)
            first.followers = ()

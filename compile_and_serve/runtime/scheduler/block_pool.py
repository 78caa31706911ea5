"""The blocks of the KV cache: how many hold each, what it contains, which is evicted next. Every operation is O(1) per
block.

A block is *used* (ref_count > 0), *pinned* (pins > 0: something other than a request reads or writes it), or *free* and in the
free queue. A block that no request uses may still be cached: its content stays findable by key until the block is handed out
again. Blocks are handed out from the head of the queue. Blocks without content lie at the head, cached ones behind them in the
order in which they were freed. So the least recently used content is evicted first, and none while an empty block is left.

Several blocks may be cached as one entry (a snapshot of recurrent state). Its key finds the first; the others follow it.
They are shared together, and freed together in their order, so they lie behind the first in the queue. When the first is
handed out, the entry is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

COMPUTED = -1  # `KVCacheBlock.step` of content that was computed before it was cached


class KVCacheBlock:
    """One block. key: names its content (runtime/scheduler/prefix_keys.py), None when it is not cached. step: number of the step
    that computes the content; later steps may read it. followers: of the first block of an entry, the others; they have its key.
    ref_count: requests that use the block. pins: holds of others. It is free while both are 0.
    """

    __slots__ = ("block_id", "followers", "key", "next", "pins", "prev", "ref_count", "step")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.pins = 0
        self.key: bytes | None = None
        self.step = COMPUTED
        self.followers: tuple[KVCacheBlock, ...] = ()
        self.prev: KVCacheBlock = self
        self.next: KVCacheBlock = self

    @property
    def is_free(self) -> bool:
        """Whether the block may be handed out."""
        return not self.ref_count and not self.pins


class FreeBlockQueue:
    """A doubly linked list of `length` blocks, through the blocks themselves. A sentinel joins its ends."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._sentinel = KVCacheBlock(-1)
        self.length = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Put the block at the tail: it is handed out last."""
        self._insert(self._sentinel.prev, block)

    def append_left(self, block: KVCacheBlock) -> None:
        """Put the block at the head: it is handed out next."""
        self._insert(self._sentinel, block)

    def pop_left(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks at the head; none where count is negative. The queue must have as many."""
        assert count <= self.length, f"{count} blocks wanted, {self.length} free"
        sentinel = self._sentinel
        first = sentinel.next
        if count == 1:  # what a decode takes
            following = first.next
            blocks = [first]
        else:
            following, blocks = first, []
            for _ in range(count):
                blocks.append(following)
                following = following.next
        sentinel.next, following.prev = following, sentinel
        self.length -= len(blocks)
        return blocks

    @property
    def first(self) -> KVCacheBlock:
        """The block at the head. The queue must not be empty."""
        return self._sentinel.next

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it lies."""
        block.prev.next, block.next.prev = block.next, block.prev
        self.length -= 1

    def block_ids(self) -> list[int]:
        """Ids from head to tail. O(length): for tests and debugging."""
        ids, block = [], self._sentinel.next
        while block is not self._sentinel:
            ids.append(block.block_id)
            block = block.next
        return ids

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        after = before.next
        before.next = after.prev = block
        block.prev, block.next = before, after
        self.length += 1


class BlockPool:
    """`num_blocks` blocks with reference counts, all free at first, and the map from key to cached block.

    on_evict: called before cached content is handed out, with the first block of its entry. It may pin the entry's blocks and return
    True: then others are handed out. It must leave as many free blocks as the caller of `allocate` wants.
    num_pinned: blocks that are pinned and that no request uses.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self.cached: dict[bytes, KVCacheBlock] = {}
        self.on_evict: Callable[[KVCacheBlock], bool] | None = None
        self.num_pinned = 0

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
                self._forget(block)
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

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
        block = self.free_queue.first
        while seen < count:
            following = block.next
            entry = (block, *block.followers)
            if block.key is None or self.cached.get(block.key) is not block or not on_evict(block):
                seen += 1
            else:
                assert all(one.pins for one in entry), f"the content of block {block.block_id} was kept, but not pinned"
                while following in entry:
                    following = following.next
            block = following

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

    def cache_together(self, block_ids: Sequence[int], key: bytes, step: int) -> None:
        """Make blocks that are not free findable as one entry, unless there is one with that key."""
        if key not in self.cached:
            first, *others = (self.blocks[block_id] for block_id in block_ids)
            self.cache(block_ids[0], key, step)
            first.followers = tuple(others)
            for block in others:
                assert block.ref_count or block.pins, f"block {block.block_id} is free"
                assert block.key is None, f"block {block.block_id} is cached already"
                block.key = key

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
        for block in list(self.cached.values()):
            self._forget(block)
        return True

    def _forget(self, first: KVCacheBlock) -> None:
        assert first.key is not None
        del self.cached[first.key]
        first.key = None
        if first.followers:
            for block in first.followers:
                block.key = None
            first.followers = ()

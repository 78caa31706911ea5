"""The blocks of the KV cache: how often each is held, what is in it, which is evicted next. All operations are O(1) a block.

A block is *used* (ref_count > 0), or *free* and in the free queue. A free block may still be cached: its content
stays findable by hash until the block is handed out again. The queue hands out from its head: blocks without content
lie at the head, cached ones behind them in the order in which they were freed, so that the least recently used
content goes first and none goes while an empty block is left.
"""

from __future__ import annotations

from collections.abc import Iterable


class KVCacheBlock:
    """One block. block_hash: identity of its content (of all tokens up to its end, and the salt), None when it is not cached."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: KVCacheBlock = self
        self.next: KVCacheBlock = self


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves; a sentinel joins its ends."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._sentinel = KVCacheBlock(-1)
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def append(self, block: KVCacheBlock) -> None:
        """Put the block at the tail: it is handed out last."""
        self._insert(self._sentinel.prev, block)

    def append_left(self, block: KVCacheBlock) -> None:
        """Put the block at the head: it is handed out next."""
        self._insert(self._sentinel, block)

    def pop_left(self) -> KVCacheBlock:
        """Take the block at the head. The queue must not be empty."""
        block = self._sentinel.next
        assert block is not self._sentinel, "the free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out wherever it lies."""
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._length -= 1

    def block_ids(self) -> list[int]:
        """Ids from head to tail (O(length): for tests and for people)."""
        ids, block = [], self._sentinel.next
        while block is not self._sentinel:
            ids.append(block.block_id)
            block = block.next
        return ids

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        after = before.next
        before.next = after.prev = block
        block.prev, block.next = before, after
        self._length += 1


class BlockPool:
    """`num_blocks` blocks with reference counts, all free at first, and the map from content hash to block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"The KV cache must have at least 1 block, got {num_blocks}; give it more memory.")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeBlockQueue(self.blocks)
        self._by_hash: dict[bytes, KVCacheBlock] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, free cached ones among them."""
        return len(self.free_queue)

    @property
    def num_cached(self) -> int:
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks (the caller has checked `num_free`), reference count 1; their old content is forgotten."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        block_ids = []
        for _ in range(count):
            block = self.free_queue.pop_left()
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                block.block_hash = None
            block.ref_count = 1
            block_ids.append(block.block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each cached block; those that were free leave the free queue."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference of each block. Order: the first is evicted first (a sequence gives its last block first)."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self.free_queue.append_left(block)
                else:
                    self.free_queue.append(block)

    def is_free(self, block_id: int) -> bool:
        return self.blocks[block_id].ref_count == 0

    def find(self, block_hash: bytes) -> int | None:
        """Id of the block with that content, used or free, or None."""
        block = self._by_hash.get(block_hash)
        return None if block is None else block.block_id

    def cache(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable, unless another one with the same content is: used blocks are never merged."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is free"
        assert block.block_hash is None, f"block {block_id} is cached already"
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            block.block_hash = block_hash

    def forget_cached(self) -> bool:
        """Forget all cached content. False, and nothing done, while any block is used."""
        if self.num_free != self.num_blocks:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        return True

"""What each kind of state does with the blocks of requests: one class per kind, one instance per state group.

- `FullBlocks`: pages of tokens, all of which later tokens read.
- `WindowBlocks`: pages of tokens, of which later tokens read those in their window.
- `SlotBlocks`: a sequence's state has a fixed size, and each step replaces it.
- `ItemBlocks` (item_blocks.py): what an encoder made of a request's items, which no step changes.

A request has one chain of keys, each of which names a whole prefix of its tokens (prefix_keys.py). The chain has a key for every g
tokens, where g is the greatest common divisor of the groups' block sizes. What a group keeps of a prefix has the chain's key at its
last token, and a suffix that keeps groups apart: the group's number, none for group 0.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from compile_and_serve.runtime.scheduler.block_pool import COMPUTED, BlockPool, KVCacheBlock
from compile_and_serve.runtime.scheduler.key_chains import KeyChains
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo

_CHAIN_KEY_BYTES = 32


@dataclass(slots=True)
class Prefix:
    """The leading tokens of a request that the prefix cache has.

    blocks: per group, those that the request can share; in a group with a window, the ones that hold the last `window`
        tokens before num_tokens; in a group of slots, the pages of the snapshot at num_tokens.
    num_ready_tokens: tokens that this step may read. The rest up to num_tokens is computed by this step, so that only later
        steps may read it.
    missing_key: key of the first block that the cache lacks; None if the prefix could not be longer.
    num_page_tokens: that the groups of pages have, where a group of slots may have no snapshot there.
    cuts: where the rest of the prefill leaves snapshots. In ascending order.
    """

    num_tokens: int = 0
    blocks: list[list[KVCacheBlock]] = field(default_factory=list)
    num_ready_tokens: int = 0
    missing_key: bytes | None = None
    num_page_tokens: int = 0
    cuts: list[int] = field(default_factory=list)


def group_of_key(key: bytes) -> int:
    """The number of the group that keeps content under the key."""
    return int.from_bytes(key[_CHAIN_KEY_BYTES:])


class GroupBlocks(ABC):
    """The blocks of one state group. index: its place in a request's lists. block_size: of `StateGroupInfo`."""

    def __init__(self, index: int, info: StateGroupInfo, pool: BlockPool, chains: KeyChains) -> None:
        self.index = index
        self.block_size = info.block_size
        self._pool = pool
        self._chains = chains
        self._keys_per_block = max(1, info.block_size // chains.tokens_per_key)
        self._suffix = b"" if index == 0 else index.to_bytes(2)

    blocks_per_key = 1

    @abstractmethod
    def prefix_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        """What a prefix of so many tokens consists of. The chain must reach to its end."""

    def keys_left(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        """What a request of so many tokens may have left in the cache. The chain must reach to its end."""
        return self.prefix_keys(request, num_tokens)

    @abstractmethod
    def publish(self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Make blocks that were filled from outside findable, `blocks_per_key` under each key, all of the request's prefix."""

    @abstractmethod
    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence needs at a time while it grows to `num_tokens`."""

    @abstractmethod
    def find(self, request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None) -> int | None:
        """The longest prefix of `num_tokens` tokens at most that the group may have; None once too much was hashed.

        Where it is num_tokens, the group has it, and its blocks are in `prefix`. Blocks that `unready_step` computes do not count.
        """

    @abstractmethod
    def num_ready(self, num_tokens: int, prefix: Prefix, step: int) -> int:
        """Tokens of a prefix of `num_tokens` that `step`, which is being scheduled, may read."""

    def num_new(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that the request takes, or is promised, when it is admitted with that prefix."""
        # For speed: `is_free` would be a call for each block.
        return self.num_blocks(len(request.token_ids)) - len([1 for block in prefix.blocks[self.index] if block.ref_count or block.pins])

    @abstractmethod
    def admit(self, request: Request, prefix: Prefix) -> None:
        """Append the group's entries to the request's lists. The prefix's blocks are shared already."""

    @abstractmethod
    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks for its first `num_tokens` tokens."""

    @abstractmethod
    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Give the request the blocks that it lacks, and lower `num_held_tokens` to the room that there is then. → their ids"""

    @abstractmethod
    def num_held(self, request: Request) -> int:
        """Tokens that the request's blocks have room for."""

    def num_promised(self, request: Request, num_tokens: int) -> int:
        """Free blocks to be kept back until the request's prefill has grown to `num_tokens`."""
        return 0

    @abstractmethod
    def cache(self, request: Request, num_computed: int, step: int) -> int:
        """Make what `num_computed` tokens have filled findable; `step` computes what is new. → tokens at which there will be more."""

    @abstractmethod
    def uncache(self, request: Request, start: int, end: int, step: int) -> set[bytes]:
        """Remove from the prefix cache what `step` or a later step computes of the request's tokens `start` … `end` - 1.
        → the keys of the chain at which that was
        """

    @abstractmethod
    def free(self, request: Request, last_step: int | None) -> None:
        """Take the request's blocks. last_step: the last one that was scheduled; None: what the request computed cannot be trusted."""

    def _keys(self, request: Request, start: int, stop: int) -> Sequence[bytes]:
        """Keys of blocks `start` … `stop` - 1. The chain must reach to the last one's end."""
        step = self._keys_per_block
        keys = request.keys[(start + 1) * step - 1 : stop * step : step]
        return [key + self._suffix for key in keys] if self._suffix else keys


class _TokenBlocks(GroupBlocks):
    """Pages of tokens."""

    def publish(self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        if self._pool.events is not None:
            wanted = set(keys)
            for number, key in enumerate(self._keys(request, 0, len(request.keys) // self._keys_per_block)):
                if key in wanted:
                    self._note(request, number, key)
        for block_id, key in zip(block_ids, keys, strict=True):
            self._pool.cache(block_id, key)

    def _note(self, request: Request, number: int, key: bytes) -> None:
        """Tell of a block that is about to be cached."""
        events = self._pool.events
        if events is not None and key not in self._pool.cached:
            events.stored(self.index, request, number, block_size=self.block_size, keys_per_block=self._keys_per_block)

    def num_ready(self, num_tokens: int, prefix: Prefix, step: int) -> int:
        blocks = prefix.blocks[self.index]
        return num_tokens - (len(blocks) - _num_ready(blocks, step)) * self.block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(request.block_ids[self.index]))

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        block_ids, size = request.block_ids[self.index], self.block_size
        new_ids = self._pool.allocate(-(-num_tokens // size) - len(block_ids))
        block_ids += new_ids
        room = len(block_ids) * size
        if room < request.num_held_tokens:
            request.num_held_tokens = room
        return new_ids

    def num_held(self, request: Request) -> int:
        return len(request.block_ids[self.index]) * self.block_size

    def cache(self, request: Request, num_computed: int, step: int) -> int:
        index = self.index
        start, stop = request.num_cached_blocks[index], num_computed // self.block_size
        if start < stop:
            request.num_cached_blocks[index] = stop
            block_ids, keys, num_freed = request.block_ids[index], request.keys, request.num_freed_blocks[index]
            per_block, suffix, cache = self._keys_per_block, self._suffix, self._pool.cache
            first = num_freed if start < num_freed else start
            if self._pool.events is not None:
                for number in range(first, stop):
                    self._note(request, number, keys[(number + 1) * per_block - 1] + suffix)
            for number in range(first, stop):
                cache(block_ids[number], keys[(number + 1) * per_block - 1] + suffix, step)
        return (stop + 1) * self.block_size

    def uncache(self, request: Request, start: int, end: int, step: int) -> set[bytes]:
        cached, suffix = self._pool.cached, self._suffix
        removed = set()
        for key in self._keys(request, start // self.block_size, end // self.block_size):
            block = cached.get(key)
            if block is not None and block.step >= step:
                self._pool.uncache(key)
                removed.add(key.removesuffix(suffix))
        return removed

    def free(self, request: Request, last_step: int | None) -> None:
        # The last ones first: the end of a prefix is of no use without its beginning.
        block_ids, num_freed = request.block_ids[self.index], request.num_freed_blocks[self.index]
        self._pool.free(reversed(block_ids[num_freed:] if num_freed else block_ids))


class FullBlocks(_TokenBlocks):
    """Blocks of all tokens."""

    def prefix_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return self._keys(request, 0, num_tokens // self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None) -> int | None:
        blocks, wanted = prefix.blocks[self.index], num_tokens // self.block_size
        if not self._find_leading(request, wanted, prefix):
            return None
        if unready_step is not None:
            del blocks[_num_ready(blocks, unready_step) :]
        del blocks[wanted:]
        return len(blocks) * self.block_size

    def _find_leading(self, request: Request, max_blocks: int, prefix: Prefix) -> bool:
        """Collect the leading cached blocks, max_blocks at most. False once too much was hashed."""
        blocks, cached = prefix.blocks[self.index], self._pool.cached
        while len(blocks) < max_blocks:
            start = len(blocks)
            stop = min(max_blocks, len(request.keys) // self._keys_per_block)
            if start == stop:
                if not self._chains.approach(request, max_blocks * self._keys_per_block):
                    return False
                continue
            for key in self._keys(request, start, stop):
                block = cached.get(key)
                if block is None:
                    prefix.missing_key = key
                    return True
                blocks.append(block)
        return True

    def admit(self, request: Request, prefix: Prefix) -> None:
        block_ids = [block.block_id for block in prefix.blocks[self.index]]
        request.num_cached_blocks.append(len(block_ids))
        request.num_freed_blocks.append(0)
        request.block_ids.append(block_ids + self._pool.allocate(-(-len(request.token_ids) // self.block_size) - len(block_ids)))


class WindowBlocks(_TokenBlocks):
    """Blocks of the tokens that are in reach of the window. A prefill gets them chunk by chunk; what it still needs is promised."""

    def __init__(self, index: int, info: StateGroupInfo, pool: BlockPool, chains: KeyChains, max_step_tokens: int) -> None:
        super().__init__(index, info, pool, chains)
        assert info.window is not None
        self._window = info.window
        self._max_blocks = -(-(info.window + max_step_tokens) // info.block_size) + 1

    def prefix_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return self._keys(request, max(0, num_tokens - self._window) // self.block_size, num_tokens // self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self.block_size), self._max_blocks)

    def find(self, request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None) -> int | None:
        size, cached = self.block_size, self._pool.cached
        first, stop = max(0, num_tokens - self._window) // size, num_tokens // size
        if not self._chains.reach(request, stop * self._keys_per_block):
            return None
        blocks: list[KVCacheBlock] = []
        for index in range(stop - 1, first - 1, -1):
            [key] = self._keys(request, index, index + 1)
            block = cached.get(key)
            if block is None or block.step == unready_step:
                prefix.missing_key = key
                return index * size
            blocks.append(block)
        blocks.reverse()
        prefix.blocks[self.index] = blocks
        return num_tokens

    def admit(self, request: Request, prefix: Prefix) -> None:
        blocks, end = prefix.blocks[self.index], prefix.num_tokens // self.block_size
        num_unread = end - len(blocks)
        request.num_cached_blocks.append(end)
        request.num_freed_blocks.append(num_unread)
        request.block_ids.append([0] * num_unread + [block.block_id for block in blocks])

    def uncache(self, request: Request, start: int, end: int, step: int) -> set[bytes]:
        cached, suffix = self._pool.cached, self._suffix
        keys = self._keys(request, start // self.block_size, end // self.block_size)
        # A block that is not there may have been evicted since: who took it up does not hold it any more once it is behind the window.
        gone = {key.removesuffix(suffix) for key in keys if key not in cached}
        return gone | super().uncache(request, start, end, step)

    def free_unread(self, request: Request, first_read: int) -> None:
        """Free blocks of tokens that neither token `first_read` nor a later one reads."""
        block_ids = request.block_ids[self.index]
        num_freed = request.num_freed_blocks[self.index]
        num_unread = min(max(0, first_read - self._window) // self.block_size, len(block_ids))
        if num_unread > num_freed:
            self._pool.free(block_ids[num_freed:num_unread])
            block_ids[num_freed:num_unread] = [0] * (num_unread - num_freed)
            request.num_freed_blocks[self.index] = num_unread

    def num_promised(self, request: Request, num_tokens: int) -> int:
        held = len(request.block_ids[self.index]) - request.num_freed_blocks[self.index]
        return max(0, self.num_blocks(num_tokens) - held)


class SlotBlocks(GroupBlocks):
    """The pages of a sequence's state.

    A snapshot is a state that stays as it is, so that other requests can take it up. Nothing is copied. A request whose state became a
    snapshot (`Request.cuts` says where) moves: its next step reads the snapshot, and writes to pages that it gets for that. A request
    that takes a snapshot up does the same. In such a step its list has the pages that are read before those that are written;
    `end_step` gives back the first. They must not be handed out in that step, which would write what it reads.

    A chunk of a prefill ends where a snapshot is due, unless the chunk can reach the prefill's end with a state that can be rolled back
    to that place.

    When a request ends or is preempted, its last state becomes a snapshot, if it can be rolled back to a place where one may lie. Without a
    snapshot, the tokens since the one before it would be computed again: that is its worth.

    snapshots: whether there are any. alignment: tokens between places where they may lie. max_draft_tokens: of one request in one step.
    """

    def __init__(
        self,
        index: int,
        info: StateGroupInfo,
        pool: BlockPool,
        chains: KeyChains,
        *,
        snapshots: bool,
        alignment: int,
        max_draft_tokens: int,
    ) -> None:
        super().__init__(index, info, pool, chains)
        assert info.pages_per_slot > 0, f"a slot of {info.pages_per_slot} pages"
        self._num_pages = self.blocks_per_key = info.pages_per_slot
        self._snapshots = snapshots
        self._alignment = alignment
        self._rollback_tokens = info.rollback_tokens
        self._max_written_beyond = info.rollback_tokens - max_draft_tokens  # of the step before, which may have been rejected
        self._moved: list[Request] = []  # in the step that is being scheduled

    def prefix_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return [self._key_at(request, num_tokens)] if num_tokens else []

    def keys_left(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return [self._key_at(request, place) for place in range(self._alignment, num_tokens + 1, self._alignment)]

    def publish(self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        if self._pool.events is not None:
            wanted = set(keys)
            for place in range(self._alignment, len(request.keys) * self._chains.tokens_per_key + 1, self._alignment):
                if (key := self._key_at(request, place)) in wanted:
                    self._note(request, place, key)
        for number, key in enumerate(keys):
            self._pool.cache_together(block_ids[number * self._num_pages : (number + 1) * self._num_pages], key, COMPUTED)

    def _note(self, request: Request, num_tokens: int, key: bytes) -> None:
        """Tell of a snapshot that is about to be cached, as of a block of the last `alignment` tokens before it."""
        events, size = self._pool.events, self._alignment
        if events is not None and key not in self._pool.cached:
            events.stored(self.index, request, num_tokens // size - 1, block_size=size, keys_per_block=size // self._chains.tokens_per_key)

    def num_blocks(self, num_tokens: int) -> int:
        return self._num_pages * (2 if self._snapshots else 1)

    def find(self, request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None) -> int | None:
        if not self._chains.reach(request, num_tokens // self._chains.tokens_per_key):
            return None
        for end in range(num_tokens, 0, -self._alignment):
            key = self._key_at(request, end)
            block = self._pool.cached.get(key)
            if block is not None and block.step != unready_step:
                prefix.blocks[self.index] = [block, *block.followers]
                return end
            if end == num_tokens:
                prefix.missing_key = key
        prefix.blocks[self.index] = []
        return 0

    def num_ready(self, num_tokens: int, prefix: Prefix, step: int) -> int:
        return 0 if any(block.step == step for block in prefix.blocks[self.index][:1]) else num_tokens

    def num_new(self, request: Request, prefix: Prefix) -> int:
        # The snapshot is given back before the prefill needs the pages that it is promised.
        num_shared = sum(block.is_free for block in prefix.blocks[self.index])
        return self._num_pages + max(num_shared, self._num_pages if prefix.cuts else 0)

    def admit(self, request: Request, prefix: Prefix) -> None:
        block_ids = [block.block_id for block in prefix.blocks[self.index]]
        if block_ids:
            self._moved.append(request)
        request.num_cached_blocks.append(prefix.num_tokens)  # where its last snapshot lies
        request.num_freed_blocks.append(0)
        request.block_ids.append(block_ids + self._pool.allocate(self._num_pages))

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return self._num_pages if self._is_snapshot(request) else 0

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        if not self._is_snapshot(request):
            return []
        new_ids = self._pool.allocate(self._num_pages)
        request.block_ids[self.index] += new_ids
        self._moved.append(request)
        return new_ids

    def end_step(self) -> None:
        """The step is complete: give back what it reads and does not write. Later steps may write it."""
        for request in self._moved:
            block_ids = request.block_ids[self.index]
            self._pool.free(block_ids[: -self._num_pages])
            del block_ids[: -self._num_pages]
        self._moved.clear()

    def num_held(self, request: Request) -> int:
        return request.num_computed_tokens if self._is_snapshot(request) else sys.maxsize

    def can_go_on(self, request: Request) -> bool:
        """Whether the state at the end of the request's prefill can be rolled back to where the next snapshot is due."""
        return request.prefill_end - request.cuts[0] <= self._rollback_tokens

    def num_promised(self, request: Request, num_tokens: int) -> int:
        return self._num_pages if request.cuts or self._is_snapshot(request) else 0

    def cache(self, request: Request, num_computed: int, step: int) -> int:
        cuts = request.cuts
        due = max((cut for cut in cuts if cut <= num_computed), default=None)
        if due is not None and num_computed - due <= self._rollback_tokens:
            self._publish(request, due, step)
        return next((cut for cut in cuts if cut > num_computed), sys.maxsize)

    def uncache(self, request: Request, start: int, end: int, step: int) -> set[bytes]:
        size = self._chains.tokens_per_key
        removed = set()
        first = (start // self._alignment + 1) * self._alignment
        for place in range(first, min(end, len(request.keys) * size) + 1, self._alignment):
            key = self._key_at(request, place)
            block = self._pool.cached.get(key)
            # Where there is none, one may have been evicted: nobody holds it after the step that took it up.
            if block is None or block.step >= step:
                removed.add(request.keys[place // size - 1])
                if block is not None:
                    self._pool.uncache(key)
        return removed

    def free(self, request: Request, last_step: int | None) -> None:
        if self._snapshots and last_step is not None and not self._is_snapshot(request):
            num_known = min(request.num_computed_tokens, len(request.token_ids) - 1)
            end = num_known // self._alignment * self._alignment
            if end > 0 and request.num_computed_tokens - end <= self._max_written_beyond:
                self._chains.extend(request, end // self._chains.tokens_per_key)
                self._publish(request, end, last_step)
        self._pool.free(request.block_ids[self.index])

    def _publish(self, request: Request, num_tokens: int, step: int) -> None:
        """Make the request's state a snapshot of its first `num_tokens` tokens, unless there is one."""
        index, block_ids = self.index, request.block_ids[self.index][-self._num_pages :]
        num_saved = num_tokens - request.num_cached_blocks[index]
        worth = max(num_saved, 1) / (self._num_pages * self.block_size)
        key = self._key_at(request, num_tokens)
        self._note(request, num_tokens, key)
        self._pool.cache_together(block_ids, key, step, worth)
        request.num_cached_blocks[index] = num_tokens

    def _is_snapshot(self, request: Request) -> bool:
        """Whether the pages that hold the request's state must stay as they are."""
        return self._pool.blocks[request.block_ids[self.index][-self._num_pages]].key is not None

    def _key_at(self, request: Request, num_tokens: int) -> bytes:
        return request.keys[num_tokens // self._chains.tokens_per_key - 1] + self._suffix


def _num_ready(blocks: list[KVCacheBlock], step: int) -> int:
    """Blocks before the first that `step` computes."""
    return next((index for index, block in enumerate(blocks) if block.step == step), len(blocks))

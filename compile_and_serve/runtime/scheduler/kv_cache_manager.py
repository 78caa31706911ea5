"""Allocates the blocks of requests, shares them through the prefix cache, and frees them.

Layers whose caches are alike form a group. A request has a list of blocks per group, all from one pool. In a group
without a window it gets the blocks of its whole prompt when it is admitted. In a group with a window it gets blocks
chunk by chunk, and gives back those that no later token reads; the pool keeps enough blocks free for the prefills
under way (`num_promised`), so a prefill never lacks a block.

Freed blocks may be handed out at once, even while a step in flight writes or reads them. Steps run on the device in the
order in which they were scheduled, so that step is over before the first step of the next owner. Cached blocks are full
and are not written again.

The blocks of a prefill are cached when the step that computes them is scheduled. Later steps may read them: they run
after it. The same step may not, because one kernel launch would read what another part of it writes. Blocks that
decodes fill are cached when their tokens are known.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, lcm

from compile_and_serve.runtime.scheduler.block_pool import COMPUTED, BlockPool, KVCacheBlock
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo

_HASHED_AT_ONCE = 64  # keys that `find_prefix` computes before it looks them up, since most prefixes end early


@dataclass(slots=True)
class Prefix:
    """The leading tokens of a request that the prefix cache has.

    blocks: per group, those that the request can share; in a group with a window, the ones that hold the last `window`
        tokens before num_tokens.
    num_ready_tokens: tokens that this step may read. The rest up to num_tokens is computed by this step, so that only later
        steps may read it.
    missing_key: key of the first block that the cache lacks; None if the prefix could not be longer.
    """

    num_tokens: int = 0
    blocks: list[list[KVCacheBlock]] = field(default_factory=list)
    num_ready_tokens: int = 0
    missing_key: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of layers and how its blocks are keyed.

    A request has one chain of keys, each of which names a whole prefix of its tokens (prefix_keys.py). The chain has a key for every g
    tokens, where g is the greatest common divisor of the groups' block sizes. A block of this group covers keys_per_block · g tokens;
    its key is the chain's key at its last token, and `suffix`, which keeps groups apart.
    max_window_blocks: most blocks that a request holds at a time in a group with a window.
    """

    index: int
    block_size: int
    window: int | None
    keys_per_block: int
    suffix: bytes
    max_window_blocks: int

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence needs at a time while it grows to `num_tokens`."""
        needed = -(-num_tokens // self.block_size)
        return needed if self.window is None else min(needed, self.max_window_blocks)

    def key(self, request: Request, index: int) -> bytes:
        """Key of block `index` of the request. The chain must reach to the block's end."""
        return request.keys[(index + 1) * self.keys_per_block - 1] + self.suffix

    def keys(self, request: Request, start: int, stop: int) -> Sequence[bytes]:
        """Keys of blocks `start` … `stop` - 1."""
        step = self.keys_per_block
        keys = request.keys[(start + 1) * step - 1 : stop * step : step]
        return [key + self.suffix for key in keys] if self.suffix else keys


class KVCacheManager:
    """Gives requests their blocks and keeps the prefix cache.

    max_step_tokens: tokens of one request in one step, at most. `prefix_queries` and `prefix_hits` count prompt tokens.
    `hash_budget`: prompt tokens that `find_prefix` may hash before the scheduler sets it again.
    """

    def __init__(self, num_blocks: int, groups: Sequence[StateGroupInfo], *, max_step_tokens: int, enable_prefix_caching: bool) -> None:
        sizes = [group.block_size for group in groups]
        if not sizes or min(sizes) < 1:
            raise ValueError(f"Every group of layers needs a block_size of at least 1, got {sizes}.")
        self.pool = BlockPool(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_promised = 0  # free blocks that prefills under way will take
        self.hash_budget = sys.maxsize
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._key_size = gcd(*sizes)  # tokens per key of the chain
        self._alignment = lcm(*sizes)  # a shared prefix ends where a block of every group ends
        self._groups = [
            _Group(
                index=index,
                block_size=group.block_size,
                window=group.window,
                keys_per_block=group.block_size // self._key_size,
                suffix=b"" if index == 0 else index.to_bytes(2),
                max_window_blocks=-(-((group.window or 0) + max_step_tokens) // group.block_size) + 1,
            )
            for index, group in enumerate(groups)
        ]
        self._window_groups = [group for group in self._groups if group.window is not None]
        self._has_one_full_group = len(groups) == 1 and not self._window_groups
        self._last_step = COMPUTED  # the last step of which blocks were cached

    @property
    def usage(self) -> float:
        """Part of the blocks that requests hold, 0–1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    @property
    def num_spare(self) -> int:
        """Free blocks that no prefill under way will need."""
        return self.pool.num_free - self.num_promised

    def max_tokens(self, limit: int) -> int:
        """Tokens, `limit` at most, that one sequence can have when it is alone."""
        return bisect_right(range(1, limit + 1), self.pool.num_blocks, key=self._num_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return sum(group.num_blocks(num_tokens) for group in self._groups)

    def find_prefix(self, request: Request, step: int, *, only_ready: bool = False) -> Prefix | None:
        """The longest prefix that every group has, for a request whose tokens are all known; `step` is being scheduled.

        At least the last token is left to compute: its logits are needed. Requests that want something of every token (prompt
        logprobs, a mean) get an empty prefix: the cache has only keys and values. None once `hash_budget` is used up.
        only_ready: take no blocks that `step` computes.
        """
        prefix = Prefix(blocks=[[] for _ in self._groups])
        if not self.enable_prefix_caching or request.reads_all_tokens:
            return prefix
        num_tokens = (len(request.token_ids) - 1) // self._alignment * self._alignment
        for group in self._groups:
            if group.window is None:
                if not self._find_leading(request, group, num_tokens // group.block_size, prefix):
                    return None
                blocks = prefix.blocks[group.index]
                if only_ready:
                    del blocks[_num_ready(blocks, step) :]
                found = len(prefix.blocks[group.index]) * group.block_size
                num_tokens = min(num_tokens, found // self._alignment * self._alignment)
        if self._window_groups:
            if len(self._window_groups) == len(self._groups):
                self._extend_keys(request, num_tokens // self._key_size)
            num_tokens = self._fit_windows(request, num_tokens, prefix, step if only_ready else None)
        prefix.num_tokens = prefix.num_ready_tokens = num_tokens
        for group in self._groups:
            blocks = prefix.blocks[group.index]
            if group.window is None:
                del blocks[num_tokens // group.block_size :]
            if self._last_step == step:
                num_unready = len(blocks) - _num_ready(blocks, step)
                prefix.num_ready_tokens = min(prefix.num_ready_tokens, num_tokens - num_unready * group.block_size)
        return prefix

    def num_new_blocks(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that the request takes, or is promised, when it is admitted with that prefix."""
        needed = self._num_blocks(len(request.token_ids))
        return needed - sum(block.ref_count > 0 for blocks in prefix.blocks for block in blocks)

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Give a request its blocks, cached ones first. The caller has compared `num_new_blocks` with `num_spare`.

        Sets block_ids, num_computed_tokens and what is counted for the prefix cache.
        """
        assert not request.block_ids, request.request_id
        num_tokens = len(request.token_ids)
        # All shared blocks first: `allocate` must not hand them out.
        for blocks in prefix.blocks:
            self.pool.share(blocks)
        request.num_freed_blocks = []
        request.num_cached_blocks = []
        for group, blocks in zip(self._groups, prefix.blocks, strict=True):
            end = prefix.num_tokens // group.block_size
            num_unread = end - len(blocks)
            block_ids = [0] * num_unread + [block.block_id for block in blocks]
            if group.window is None:
                block_ids += self.pool.allocate(-(-num_tokens // group.block_size) - end)
            request.block_ids.append(block_ids)
            request.num_freed_blocks.append(num_unread)
            request.num_cached_blocks.append(end)
        request.num_computed_tokens = prefix.num_tokens
        self._set_held(request)
        self._set_next_cache_len(request)
        self._promise(request, num_tokens)
        if request.num_preemptions == 0 and self.enable_prefix_caching and not request.reads_all_tokens:
            self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += prefix.num_tokens
            request.num_cached_tokens = prefix.num_tokens

    def grow_for_chunk(self, request: Request, start: int, end: int) -> list[list[int]] | None:
        """Give a prefill the blocks of tokens `start` … `end` - 1; the new ones per group, or None where it has them all."""
        new_ids = None
        if end > request.num_held_tokens:
            new_ids = self.grow(request, end, start)
            assert new_ids is not None, f"{request.request_id}: the blocks of its prefill were promised"
        if self._window_groups:
            self._promise(request, request.prefill_end if end < request.prefill_end else 0)
        return new_ids

    def grow(self, request: Request, num_tokens: int, first_read: int) -> list[list[int]] | None:
        """Give the request blocks for its first `num_tokens` tokens; the new ones per group, or None where too few are
        free.

        The request's next step computes tokens from `first_read` on. Blocks out of reach of their windows are freed.
        """
        pool = self.pool
        if self._has_one_full_group:
            block_ids = request.block_ids[0]
            count = -(-num_tokens // self._key_size) - len(block_ids)
            if count > pool.free_queue.length:
                return None
            new_ids = pool.allocate(count)
            block_ids += new_ids
            request.num_held_tokens = len(block_ids) * self._key_size
            return [new_ids]
        for group in self._window_groups:
            self._free_unread(request, group, first_read)
        counts = [
            max(0, -(-num_tokens // group.block_size) - len(block_ids))
            for group, block_ids in zip(self._groups, request.block_ids, strict=True)
        ]
        if sum(counts) > self.num_spare + request.num_promised_blocks:
            return None
        all_new = [pool.allocate(count) for count in counts]
        for block_ids, new_ids in zip(request.block_ids, all_new, strict=True):
            block_ids += new_ids
        self._set_held(request)
        return all_new

    def cache_blocks(self, request: Request, num_computed: int, step: int = COMPUTED) -> None:
        """Make the full blocks of the first `num_computed` tokens findable. `step` computes those that are new.

        Need not be called while num_computed < request.next_cache_len.
        """
        if not self.enable_prefix_caching:
            return
        if step != COMPUTED:
            self._last_step = step
        self._extend_keys(request, num_computed // self._key_size)
        pool, num_cached = self.pool, request.num_cached_blocks
        if self._has_one_full_group:  # for speed: the loop below does the same
            size, block_ids, keys = self._key_size, request.block_ids[0], request.keys
            for index in range(num_cached[0], num_computed // size):
                pool.cache(block_ids[index], keys[index], step)
                num_cached[0] = index + 1
            request.next_cache_len = (num_cached[0] + 1) * size
            return
        for number, group in enumerate(self._groups):
            block_ids, start = request.block_ids[number], num_cached[number]
            for index in range(start, num_computed // group.block_size):
                if index >= request.num_freed_blocks[number]:
                    pool.cache(block_ids[index], group.key(request, index), step)
                num_cached[number] = index + 1
        self._set_next_cache_len(request)

    def uncache(self, request: Request, num_tokens: int, step: int) -> set[int]:
        """Remove from the prefix cache those blocks of the request's first `num_tokens` tokens that `step` or a later step
        computes. → their ids
        """
        block_ids = set()
        if self.enable_prefix_caching:
            for group in self._groups:
                for key in group.keys(request, 0, num_tokens // group.block_size):
                    block = self.pool.cached.get(key)
                    if block is not None and block.step >= step:
                        self.pool.uncache(block.block_id)
                        block_ids.add(block.block_id)
        return block_ids

    def free(self, request: Request) -> None:
        """Take all blocks of the request, the last ones first: the end of a prefix is of no use without its beginning."""
        for block_ids, num_freed in zip(request.block_ids, request.num_freed_blocks, strict=True):
            self.pool.free(reversed(block_ids[num_freed:] if num_freed else block_ids))
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_held_tokens = 0
        self.num_promised -= request.num_promised_blocks
        request.num_promised_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget the cached content. Returns False, and does nothing, while a request holds blocks."""
        return self.pool.uncache_all()

    def _find_leading(self, request: Request, group: _Group, max_blocks: int, prefix: Prefix) -> bool:
        """Collect the group's leading cached blocks, max_blocks at most. False once `hash_budget` is used up."""
        blocks, cached = prefix.blocks[group.index], self.pool.cached
        while len(blocks) < max_blocks:
            start = len(blocks)
            stop = min(max_blocks, len(request.keys) // group.keys_per_block)
            if start == stop:
                if self.hash_budget <= 0:
                    return False
                num_keys = min(max_blocks * group.keys_per_block, len(request.keys) + _HASHED_AT_ONCE)
                self.hash_budget -= (num_keys - len(request.keys)) * self._key_size
                self._extend_keys(request, num_keys)
                continue
            for key in group.keys(request, start, stop):
                block = cached.get(key)
                if block is None:
                    prefix.missing_key = key
                    return True
                blocks.append(block)
        return True

    def _fit_windows(self, request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None) -> int:
        """Shorten a prefix until each group with a window has the tokens that the window reaches; its length. Blocks that
        `unready_step` computes do not count.
        """
        cached = self.pool.cached
        is_found = False
        while not is_found:
            is_found = True
            for group in self._window_groups:
                assert group.window is not None
                size = group.block_size
                blocks: list[KVCacheBlock] = []
                for index in range(num_tokens // size - 1, max(0, num_tokens - group.window) // size - 1, -1):
                    key = group.key(request, index)
                    block = cached.get(key)
                    if block is None or block.step == unready_step:
                        num_tokens = index * size // self._alignment * self._alignment
                        prefix.missing_key = key
                        is_found = False
                        break
                    blocks.append(block)
                blocks.reverse()
                prefix.blocks[group.index] = blocks
        return num_tokens

    def _free_unread(self, request: Request, group: _Group, first_read: int) -> None:
        """Free blocks of tokens that neither token `first_read` nor a later one reads."""
        assert group.window is not None
        block_ids = request.block_ids[group.index]
        num_freed = request.num_freed_blocks[group.index]
        num_unread = min(max(0, first_read - group.window) // group.block_size, len(block_ids))
        if num_unread > num_freed:
            self.pool.free(block_ids[num_freed:num_unread])
            block_ids[num_freed:num_unread] = [0] * (num_unread - num_freed)
            request.num_freed_blocks[group.index] = num_unread

    def _promise(self, request: Request, num_tokens: int) -> None:
        """Keep back what the request's groups with a window still need to grow to `num_tokens`."""
        promised = 0
        for group in self._window_groups:
            held = len(request.block_ids[group.index]) - request.num_freed_blocks[group.index]
            promised += max(0, group.num_blocks(num_tokens) - held)
        self.num_promised += promised - request.num_promised_blocks
        request.num_promised_blocks = promised

    def _set_held(self, request: Request) -> None:
        request.num_held_tokens = min(
            len(block_ids) * group.block_size for group, block_ids in zip(self._groups, request.block_ids, strict=True)
        )

    def _set_next_cache_len(self, request: Request) -> None:
        if self.enable_prefix_caching:
            request.next_cache_len = min(
                (num_cached + 1) * group.block_size for group, num_cached in zip(self._groups, request.num_cached_blocks, strict=True)
            )
        else:
            request.next_cache_len = sys.maxsize

    def _extend_keys(self, request: Request, num_keys: int) -> None:
        """Extend the request's chain to `num_keys` keys. Sequences of one prompt share the chain until one extends beyond the prompt."""
        size, keys, prompt = self._key_size, request.keys, request.prompt
        if len(keys) >= num_keys:
            return
        if keys is prompt.keys:
            num_shared = min(num_keys, request.num_prompt_tokens // size)
            if len(keys) < num_shared:
                extend_keys(keys, prompt.root_key, prompt.token_ids, size, num_shared)
            if num_keys == num_shared:
                return
            keys = request.keys = keys.copy()
        extend_keys(keys, prompt.root_key, request.token_ids, size, num_keys)


def _num_ready(blocks: list[KVCacheBlock], step: int) -> int:
    """Blocks before the first that `step` computes."""
    return next((index for index, block in enumerate(blocks) if block.step == step), len(blocks))

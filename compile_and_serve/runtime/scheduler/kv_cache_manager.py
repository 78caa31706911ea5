"""Allocates the blocks of requests, shares them through the prefix cache, and frees them.

Layers whose state is alike form a group. A request has a list of blocks per group, all from one pool; kv_groups.py says what each
kind of group does with them. In a group without a window it gets the blocks of its whole prompt when it is admitted. In a group with
a window it gets blocks chunk by chunk, and gives back those that no later token reads; in a group of slots it needs more where a
snapshot is due. The pool keeps enough blocks free for the prefills under way (`num_promised`), so a prefill never lacks a block, unless
what it or another one gave back is pinned.

A block is handed out when its last reader is through. For steps that is at once, even while a step in flight writes or reads the
block: steps run on the device in the order in which they were scheduled, so that step is over before the first step of the next
owner. What else reads or writes a block pins it (transfers.py). Cached blocks are full and are not written again.

The blocks of a prefill are cached when the step that computes them is scheduled. Later steps may read them: they run
after it. The same step may not, because one kernel launch would read what another part of it writes. Blocks that
decodes fill are cached when their tokens are known.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from math import gcd, lcm

from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.scheduler.block_pool import COMPUTED, BlockPool
from compile_and_serve.runtime.scheduler.item_blocks import ItemBlocks
from compile_and_serve.runtime.scheduler.key_chains import KeyChains
from compile_and_serve.runtime.scheduler.kv_groups import FullBlocks, GroupBlocks, Prefix, SlotBlocks, WindowBlocks
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo

SNAPSHOT_DISTANCE = 4096  # tokens: of a prompt's snapshots from each other, at least; each but the last ends a step's part of the prompt
MAX_SEEN_KEYS = 1 << 16  # of prompts, where no group keeps tokens: a million tokens


class KVCacheManager:
    """Gives requests their blocks and keeps the prefix cache.

    max_step_tokens: tokens of one request in one step, at most. max_draft_tokens: drafts among them. `prefix_queries` and
    `prefix_hits` count prompt tokens. There is no prefix caching where a group of slots has no snapshots. Without groups, requests
    need no blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[StateGroupInfo],
        *,
        max_step_tokens: int,
        enable_prefix_caching: bool,
        max_draft_tokens: int = 0,
    ) -> None:
        sizes = [group.block_size for group in groups if group.kind != "items"]
        if min(sizes, default=1) < 1:
            raise ValueError(f"Every group of layers needs a block_size of at least 1, got {sizes}.")
        if groups and num_blocks < 1:
            raise ValueError(f"The KV cache must have at least 1 block, got {num_blocks}; give it more memory.")
        self.pool = BlockPool(num_blocks)
        self.enable_prefix_caching = (
            enable_prefix_caching and bool(groups) and all(group.snapshots for group in groups if group.kind == "slot")
        )
        self.chains = KeyChains(gcd(*sizes) or 1)
        self.num_promised = 0  # free blocks that prefills under way will take
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.alignment = lcm(*sizes)  # a shared prefix ends where a block of every group ends
        self._groups: list[GroupBlocks] = []
        for index, group in enumerate(groups):
            common = index, group, self.pool, self.chains
            if group.kind == "slot":
                slots = SlotBlocks(
                    *common, snapshots=self.enable_prefix_caching, alignment=self.alignment, max_draft_tokens=max_draft_tokens
                )
                self._groups.append(slots)
            elif group.kind == "items":
                self._groups.append(ItemBlocks(*common))
            elif group.window is None:
                self._groups.append(FullBlocks(*common))
            else:
                self._groups.append(WindowBlocks(*common, max_step_tokens))
        kinds: list[type[GroupBlocks]] = [FullBlocks, WindowBlocks, SlotBlocks, ItemBlocks]
        # What is cheap to find comes first, what is dear to lose is freed last.
        self._by_kind = sorted(self._groups, key=lambda group: kinds.index(type(group)))
        self._windows = [group for group in self._groups if isinstance(group, WindowBlocks)]
        self._slots = [group for group in self._groups if isinstance(group, SlotBlocks)]
        self.keeps_all_tokens = all(isinstance(group, FullBlocks) for group in self._groups)  # while a request runs
        self._pages = [group for group in self._by_kind if not isinstance(group, SlotBlocks | ItemBlocks)]
        self.items = next((group for group in self._groups if isinstance(group, ItemBlocks)), None)
        # More than one step of a request can need: with as many free blocks, nobody counts.
        self._ample = sum(group.pages_per_slot or max_step_tokens // group.block_size + 2 for group in groups)
        self._seen: dict[bytes, None] = {}  # keys of prompts, where no group keeps tokens, the oldest first
        self._last_step = COMPUTED  # the last step of which blocks were cached
        self._num_wanted = self._ample  # by what takes blocks now, at most

    @property
    def usage(self) -> float:
        """Part of the blocks that requests hold, 0–1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks if self.pool.num_blocks else 0.0

    def add_to(self, stats: EngineStats) -> None:
        """Add the pool's part."""
        stats.kv_cache_usage, stats.num_free_blocks, stats.num_total_blocks = self.usage, self.pool.num_free, self.pool.num_blocks
        stats.prefix_cache_queries, stats.prefix_cache_hits = self.prefix_queries, self.prefix_hits

    @property
    def num_spare(self) -> int:
        """Free blocks that no prefill under way will need; without groups nobody needs any."""
        return self.pool.num_free - self.num_promised if self._groups else sys.maxsize

    @property
    def num_kept_free(self) -> int:
        """Blocks that must stay free while cached content is kept from being evicted."""
        return self.num_promised + self._num_wanted

    def max_tokens(self, limit: int) -> int:
        """Tokens, `limit` at most, that one sequence can have when it is alone."""
        return bisect_right(
            range(1, limit + 1), self.pool.num_blocks, key=lambda num_tokens: sum(group.num_blocks(num_tokens) for group in self._groups)
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens needs, if it finds nothing in the prefix cache."""
        return sum(group.num_blocks(num_tokens) for group in self._groups)

    def find_prefix(self, request: Request, step: int, *, only_ready: bool = False) -> Prefix | None:
        """The longest prefix that every group has, for a request whose tokens are all known; `step` is being scheduled.

        At least the last token is left to compute: its logits are needed. Requests that want something of every token (prompt
        logprobs, a mean) get an empty prefix: the cache has only keys and values. None once the budget of `chains` is used up.
        only_ready: take no blocks that `step` computes.
        """
        prefix = Prefix(blocks=[[] for _ in self._groups])
        if not self.enable_prefix_caching:
            return prefix
        longest = (len(request.token_ids) - 1) // self.alignment * self.alignment
        in_pages = 0  # tokens of the prefix that the groups without slots have
        if not request.reads_all_tokens:
            unready_step = step if only_ready else None
            found = self._fit(self._pages, request, longest, prefix, unready_step)
            if found is not None and self._slots:
                in_pages = found if self._pages else 0
                prefix.num_page_tokens = in_pages
                found = self._fit(self._by_kind, request, found, prefix, unready_step)
            if found is None:
                return None
            prefix.num_tokens = prefix.num_ready_tokens = found
            if self._last_step == step:
                prefix.num_ready_tokens = min(group.num_ready(found, prefix, step) for group in self._groups)
        if self._slots:
            if not self._pages:
                in_pages = prefix.num_page_tokens = self._parting_place(request, longest)
            distant = self._distant_places(prefix.num_tokens, longest)
            prefix.cuts = sorted({cut for cut in (in_pages, longest, *distant) if cut > prefix.num_tokens})
        return prefix

    def _distant_places(self, begin: int, end: int) -> list[int]:
        """Where the prefill of tokens `begin` … `end` - 1 leaves snapshots for requests that part from it: at growing distances from its
        end. What such a request computes again is then no longer than what it does not share.
        """
        places, distance = [], SNAPSHOT_DISTANCE
        while end - distance >= begin + SNAPSHOT_DISTANCE:
            places.append((end - distance) // self.alignment * self.alignment)
            distance *= 2
        return places

    def _parting_place(self, request: Request, num_tokens: int) -> int:
        """Up to where an earlier request had the same tokens, where no group keeps tokens and so knows it."""
        keys = self._keys_of_places(request, num_tokens)
        return next((number for number in range(len(keys), 0, -1) if keys[number - 1] in self._seen), 0) * self.alignment

    def _remember(self, request: Request) -> None:
        """Let later requests find where they part from this one."""
        for key in self._keys_of_places(request, len(request.token_ids)):
            self._seen[key] = None
        while len(self._seen) > MAX_SEEN_KEYS:
            del self._seen[next(iter(self._seen))]

    def _keys_of_places(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        """Of the first `num_tokens` tokens, as far as the chain reaches: the keys at which a snapshot may lie."""
        step = self.alignment // self.chains.tokens_per_key
        return request.keys[step - 1 : num_tokens // self.chains.tokens_per_key : step]

    def _fit(
        self, groups: Sequence[GroupBlocks], request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None
    ) -> int | None:
        """Shorten a prefix of `num_tokens` until each of the groups has it; its length. None once too much was hashed."""
        is_found = False
        while not is_found:
            is_found = True
            for group in groups:
                found = group.find(request, num_tokens, prefix, unready_step)
                if found is None:
                    return None
                if found < num_tokens:
                    num_tokens = found // self.alignment * self.alignment
                    is_found = False
        return num_tokens

    def longest_prefix(self, request: Request) -> int:
        """Tokens of the longest prefix that a waiting request could share."""
        if not self.enable_prefix_caching or request.reads_all_tokens:
            return 0
        return (len(request.token_ids) - 1) // self.alignment * self.alignment

    def keys_of_prefix(self, request: Request, num_tokens: int) -> list[list[bytes]]:
        """What a prefix of so many tokens, a multiple of `alignment`, consists of in each group."""
        self.chains.extend(request, num_tokens // self.chains.tokens_per_key)
        return [list(group.prefix_keys(request, num_tokens)) for group in self._groups]

    def keys_left(self, request: Request) -> list[list[bytes]]:
        """What a request that has ended may have left in the cache, in each group."""
        num_tokens = (len(request.token_ids) - 1) // self.alignment * self.alignment if self.enable_prefix_caching else 0
        self.chains.extend(request, num_tokens // self.chains.tokens_per_key)
        return [list(group.keys_left(request, num_tokens)) for group in self._groups]

    def blocks_per_key(self, group: int) -> int:
        """Blocks that a key of the group names."""
        return self._groups[group].blocks_per_key

    def publish(self, group: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Make pinned blocks findable that were filled from outside. keys: of the request's prefix."""
        self._groups[group].publish(request, keys, block_ids)

    def allocate_pinned(self, count: int) -> list[int]:
        """Take blocks that no request uses, pinned once. The caller has compared `count` with `num_spare`."""
        self._num_wanted = count
        block_ids = self.pool.allocate(count)
        self._num_wanted = self._ample
        self.pool.pin(block_ids)
        self.pool.free(block_ids)
        return block_ids

    def num_new_blocks(self, request: Request, prefix: Prefix) -> int:
        """Free blocks that the request takes, or is promised, when it is admitted with that prefix."""
        return sum(group.num_new(request, prefix) for group in self._groups)

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Give a request its blocks, cached ones first. The caller has compared `num_new_blocks` with `num_spare`.

        Sets block_ids, num_computed_tokens, cuts and what is counted for the prefix cache.
        """
        assert not request.block_ids, request.request_id
        if self.pool.on_evict is not None:
            self._num_wanted = self.num_new_blocks(request, prefix)
        # All shared blocks first: `allocate` must not hand them out.
        for blocks in prefix.blocks:
            self.pool.share(blocks)
        request.num_freed_blocks = []
        request.num_cached_blocks = []
        for group in self._groups:
            group.admit(request, prefix)
        self._num_wanted = self._ample
        request.num_computed_tokens = request.num_prefix_tokens = prefix.num_tokens
        request.cuts = prefix.cuts.copy()
        request.num_held_tokens = min([group.num_held(request) for group in self._groups], default=sys.maxsize)
        if self.enable_prefix_caching:
            if not self._pages:
                self._remember(request)
            request.next_cache_len = min(group.cache(request, prefix.num_tokens, COMPUTED) for group in self._groups)
        else:
            request.next_cache_len = sys.maxsize
        self._promise(request, len(request.token_ids))
        if request.num_preemptions == 0 and self.enable_prefix_caching and not request.reads_all_tokens:
            self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += prefix.num_tokens
            request.num_cached_tokens = prefix.num_tokens

    @property
    def may_lack_room(self) -> bool:
        """Whether blocks that were promised to a prefill may not be there: pinned, or out of its window but still in use by others."""
        return self.pool.num_pinned > 0 or (bool(self._windows) and self.enable_prefix_caching)

    def has_room(self, request: Request, end: int) -> bool:
        """Whether a prefill can have its first `end` tokens. Always, unless `may_lack_room`."""
        if end <= request.num_held_tokens:
            return True
        for windows in self._windows:
            windows.free_unread(request, request.num_computed_tokens)
        spare = self.pool.num_free - self.num_promised + request.num_promised_blocks
        return spare >= sum(group.num_missing(request, end) for group in self._groups)

    def chunk_limit(self, request: Request) -> int:
        """Where the next chunk of a prefill must end: where a snapshot is due, or at its end."""
        if request.cuts and not all(slots.can_go_on(request) for slots in self._slots):
            return request.cuts[0]
        return request.prefill_end

    def grow_for_chunk(self, request: Request, start: int, end: int) -> list[list[int]] | None:
        """Give a prefill the blocks of tokens `start` … `end` - 1; the new ones per group, or None where it has them all."""
        new_ids = None
        if end > request.num_held_tokens:
            new_ids = self.grow(request, end, start)
            assert new_ids is not None, f"{request.request_id}: the blocks of its prefill were promised"
        self._promise(request, request.prefill_end if end < request.prefill_end else 0)
        return new_ids

    def grow(self, request: Request, num_tokens: int, first_read: int) -> list[list[int]] | None:
        """Give the request blocks for its first `num_tokens` tokens; the new ones per group, or None where too few are
        free.

        The request's next step computes tokens from `first_read` on. Blocks out of reach of their windows are freed.
        """
        groups = self._groups
        for windows in self._windows:
            windows.free_unread(request, first_read)
        spare = self.pool.free_queue.length - self.num_promised + request.num_promised_blocks
        if spare < self._ample and spare < sum(group.num_missing(request, num_tokens) for group in groups):
            return None
        request.num_held_tokens = sys.maxsize
        new_ids = []
        for group in groups:  # a comprehension is a call
            new_ids.append(group.grow(request, num_tokens))  # noqa: PERF401
        if request.num_promised_blocks:  # to a state that moves; `grow_for_chunk` says what a prefill needs next
            self._promise(request, 0)
        return new_ids

    def cache_blocks(self, request: Request, num_computed: int, step: int = COMPUTED) -> None:
        """Make the full blocks of the first `num_computed` tokens findable. `step` computes those that are new.

        Need not be called while num_computed < request.next_cache_len.
        """
        if not self.enable_prefix_caching:
            return
        if step != COMPUTED:
            self._last_step = step
        chains = self.chains
        chains.extend(request, num_computed // chains.tokens_per_key)
        next_len = sys.maxsize
        for group in self._groups:
            group_len = group.cache(request, num_computed, step)
            if group_len < next_len:
                next_len = group_len
        request.next_cache_len = next_len
        if request.cuts and request.cuts[0] <= num_computed:
            request.cuts = [cut for cut in request.cuts if cut > num_computed]
            request.num_held_tokens = min([group.num_held(request) for group in self._groups], default=sys.maxsize)
            self._promise(request, request.prefill_end if num_computed < request.prefill_end else 0)

    def end_step(self, *, has_tokens: bool = True) -> list[int]:
        """A step is complete: no more blocks are handed out for it. → `BlockPool.take_emptied`, of a step with tokens"""
        emptied = self.pool.take_emptied() if has_tokens else []  # before what the step still reads is given back
        for slots in self._slots:
            slots.end_step()
        return emptied

    def uncache(self, request: Request, start: int, end: int, step: int) -> set[bytes]:
        """Remove from the prefix cache what `step` or a later step computes of the request's tokens `start` … `end` - 1.
        → the keys at which that was, for `has_prefix`
        """
        if not self.enable_prefix_caching:
            return set()
        return set().union(*(group.uncache(request, start, end, step) for group in self._groups))

    def has_prefix(self, request: Request, num_tokens: int, keys: set[bytes]) -> bool:
        """Whether one of `keys` is within the request's first `num_tokens` tokens."""
        return not keys.isdisjoint(request.keys[: num_tokens // self.chains.tokens_per_key])

    def free(self, request: Request, last_step: int | None) -> None:
        """Take all blocks of the request. last_step: the last one that was scheduled; None: what the request computed cannot be trusted."""
        for group in self._by_kind:
            group.free(request, last_step)
        request.block_ids = []
        request.cuts = []
        request.num_computed_tokens = 0
        request.num_held_tokens = 0
        self.num_promised -= request.num_promised_blocks
        request.num_promised_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget the cached content. Returns False, and does nothing, while a request holds blocks."""
        return self.pool.uncache_all()

    def _promise(self, request: Request, num_tokens: int) -> None:
        """Keep back what the request's groups still need to grow to `num_tokens`."""
        promised = sum(group.num_promised(request, num_tokens) for group in self._groups)
        self.num_promised += promised - request.num_promised_blocks
        request.num_promised_blocks = promised

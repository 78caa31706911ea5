"""`Transfers`: loads and stores of blocks by a connector, as the scheduler sees them.

A transfer pins its blocks from the step that begins it until every rank is through with it, so that nobody else gets them meanwhile.

A load fills the prefix cache. The request waits, as it does for a grammar, while blocks are filled that no request uses. Then it is
admitted and finds its prefix. Until then the prefix is *held*: pinned, so that it is not evicted. If a load fails or takes too long,
the request computes those tokens.

Content is stored when it is about to be evicted, or when its request has ended, as the connector wants. Only what steps have computed whose
results are known is stored.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from compile_and_serve.runtime.connector.connector import PrefixQuery, SchedulerConnector
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.messages import EngineStats, FinishReason, RequestOutput
from compile_and_serve.runtime.scheduler.block_pool import KVCacheBlock
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.kv_groups import Prefix, group_of_key
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from compile_and_serve.runtime.scheduler.steps_in_flight import Chunk

logger = logging.getLogger(__name__)

EVICTED_FRACTION = 8  # one block in this many, at most, waits to be stored before it is evicted
_EARLY_SHARE = 0.5  # of the spare blocks, that a prompt that is still computed elsewhere may take
_NO_STEP = -2  # is scheduled


@dataclass(eq=False, slots=True)
class _Load:
    """For one request, and others that wait for the same content.

    held: blocks of the whole prefix, in the order of unpinning. num_tokens: that are loaded, by tier. num_left: transfers that have not
    ended. error: of the first that failed. is_early: for requests that will come, which load the prefix themselves if this fails.
    """

    request: Request
    num_tokens: dict[str, int]
    held: list[int]
    num_left: int = 0
    error: str | None = None
    is_early: bool = False
    transfers: list[BlockTransfer] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    is_done: Future[None] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _InFlight:
    """load: what it belongs to; None: it is a store. is_overdue: nobody waits for it any more, but it may still touch its blocks.
    is_lease: a store that lasts until the other engine has the blocks, or until its deadline. is_ending: of a lease, it was cancelled.
    """

    transfer: BlockTransfer
    load: _Load | None
    deadline: float
    is_eviction: bool
    is_overdue: bool = False
    is_lease: bool = False
    is_ending: bool = False


class Transfers:
    """clock: seconds, for deadlines."""

    def __init__(self, manager: KVCacheManager, connector: SchedulerConnector, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager, self._pool, self._connector, self._clock = manager, manager.pool, connector, clock
        self._in_flight: dict[int, _InFlight] = {}  # in the order in which they began
        self._num_overdue = 0
        self._leases: dict[int, _InFlight] = {}  # that last, in the order in which they began
        self._num_evicted = 0  # blocks that wait to be stored before they are evicted
        self._new = StepTransfers()  # for the next step
        self._next_id = 0
        self._loading: dict[bytes, _Load] = {}  # by the keys that it brings
        self._lent_early: dict[Request, int] = {}  # tokens whose blocks are lent
        self._held: dict[Request, list[int]] = {}  # of loaded prefixes whose requests have not been admitted yet
        self._last_known_step = -1
        self._pool.on_evict = self._store_evicted

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is in flight whose end somebody waits for, or one is to begin or to be cancelled."""
        is_moving = len(self._in_flight) > self._num_overdue + len(self._leases)
        return is_moving or self.has_orders or self._lease_is_due

    @property
    def has_orders(self) -> bool:
        """Whether a transfer is to begin or to be cancelled. That need not wait for steps in flight: another engine may ask for what is
        lent to it at once.
        """
        return bool(self._new.loads or self._new.stores or self._new.cancelled)

    @property
    def has_leases(self) -> bool:
        """Whether other engines may still fetch blocks."""
        return bool(self._leases)

    @property
    def _lease_is_due(self) -> bool:
        if not self._leases:
            return False
        return self._connector.has_released or self._clock() > next(iter(self._leases.values())).deadline

    @property
    def may_end(self) -> bool:
        """Whether transfers that were cancelled, because they were overdue, have had too little time to end."""
        latest = self._clock() - self._connector.deadline_seconds
        return any(one.is_overdue and one.deadline >= latest for one in self._in_flight.values())

    def load_early(self, request: Request) -> None:
        """Begin to load the prefix of a request that will come, as far as another engine has computed it, and the rest once it has."""
        manager = self._manager
        if manager.keeps_all_tokens:
            manager.chains.budget = sys.maxsize
            prefix = manager.find_prefix(request, _NO_STEP)
            assert prefix is not None
            self.load(request, prefix, int(manager.num_spare * _EARLY_SHARE), is_early=True)

    def load(self, request: Request, prefix: Prefix, num_spare: int, *, is_early: bool = False) -> bool:
        """Let a request wait for more of its prefix than the cache has. False if nothing more can be loaded into `num_spare` blocks."""
        manager, pool = self._manager, self._pool
        longest = manager.longest_prefix(request)
        if not request.may_load or longest <= prefix.num_tokens:
            return False
        query = PrefixQuery(
            request_id=request.request_id,
            num_cached_tokens=prefix.num_tokens,
            max_tokens=longest,
            alignment=manager.alignment,
            keys_at=partial(manager.keys_of_prefix, request),
        )
        end = min(prefix.num_tokens + self._connector.match(query), longest) // manager.alignment * manager.alignment
        if end <= prefix.num_tokens:
            return False
        keys = manager.keys_of_prefix(request, end)
        other = next((self._loading[key] for group_keys in keys for key in group_keys if key in self._loading), None)
        if other is not None:
            other.waiting.append(request)
            request.waits_for.append(other.is_done)
            return True
        missing = [[key for key in group_keys if key not in pool.cached] for group_keys in keys]
        num_new = sum(len(group_keys) * manager.blocks_per_key(group) for group, group_keys in enumerate(missing))
        cached = [block for group_keys in keys for key in group_keys if key in pool.cached for block in pool.entry(key)]
        if not num_new or num_new + sum(block.is_free for block in cached) > num_spare:
            return False
        request.may_load = False
        pool.pin([block.block_id for block in cached])
        new_ids = manager.allocate_pinned(num_new)
        tiers = self._connector.tiers_of(key for group_keys in missing for key in group_keys)
        load = _Load(request, _shared_out(end - prefix.num_tokens, tiers), held=[], is_early=is_early)
        for group, group_keys in enumerate(keys):
            size, first_new, ids = manager.blocks_per_key(group), len(new_ids), list[int]()
            loaded: list[int] = []
            for key in group_keys:
                if key in pool.cached:
                    ids += [block.block_id for block in pool.entry(key)]
                else:
                    loaded += new_ids[:size]
                    ids += new_ids[:size]
                    del new_ids[:size]
                    self._loading[key] = load
            if first_new > len(new_ids):
                load.transfers.append(self._begin(group, missing[group], loaded, load))
            # As where blocks are freed: the end of a prefix is evicted before its beginning, an entry's blocks in their order.
            load.held += ids if size > 1 else reversed(ids)
        load.num_left = len(load.transfers)
        request.waits_for.append(load.is_done)
        return True

    def add_to(self, stats: EngineStats) -> None:
        """What the connector tells."""
        stats.kv_tiers = self._connector.stats()

    def arrived(self, request: Request, params: dict[str, Any]) -> None:
        """Another engine began the request, or is to continue it."""
        self._connector.arrived(request.request_id, params)

    def hand_over(self, request: Request, output: RequestOutput) -> dict[str, Any]:
        """Lend the blocks of a request's prompt to the engine that continues it. → what that engine must be told. The request has ended
        and its blocks are freed; `output` is its last.
        """
        manager, pool, connector = self._manager, self._pool, self._connector
        self.lend_early(request, request.num_prompt_tokens)
        self._lent_early.pop(request, None)
        num_tokens, keys = self._lendable(request, request.num_prompt_tokens - (not output.new_token_ids))
        blocks = [[block for key in group_keys for block in pool.entry(key)] for group_keys in keys]
        taken = sum(block.is_free for group_blocks in blocks for block in group_blocks)
        ids: list[int] = []
        if num_tokens and pool.num_free - taken >= manager.num_promised:  # prefills under way need those
            block_ids = [[block.block_id for block in group_blocks] for group_blocks in blocks]
            connector.lend(block_ids, num_tokens)
            for group, group_keys in enumerate(keys):
                if group_keys:
                    ids.append(self._begin(group, group_keys, block_ids[group], None, is_lease=True).transfer_id)
        return connector.lent(request.request_id, request.kv_transfer or {}, ids, output.new_token_ids, output.new_logprobs)

    def lend_early(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a prompt are computed: lend their blocks, if another engine already fetches them."""
        manager, pool, connector = self._manager, self._pool, self._connector
        if not manager.keeps_all_tokens or not connector.lends_early(request.request_id):
            return
        end, keys = self._lendable(request, num_tokens)
        before = manager.keys_of_prefix(request, min(end, self._lent_early.get(request, 0)))
        new = [group_keys[len(lent) :] for group_keys, lent in zip(keys, before, strict=False)]  # none where nothing can be lent
        blocks = [[block for key in group_keys for block in pool.entry(key)] for group_keys in new]
        taken = sum(block.is_free for group_blocks in blocks for block in group_blocks)
        if not any(new) or pool.num_free - taken < manager.num_promised:  # the next call lends them, too
            return
        ids = [
            self._begin(group, group_keys, [block.block_id for block in blocks[group]], None, is_lease=True).transfer_id
            for group, group_keys in enumerate(new)
            if group_keys
        ]
        self._lent_early[request] = end
        connector.lent_early(request.request_id, ids)

    def _lendable(self, request: Request, num_tokens: int) -> tuple[int, list[list[bytes]]]:
        """The longest prefix of so many tokens at most that all groups have, and its keys: of groups of slots, the last places only."""
        manager = self._manager
        last = num_tokens // manager.alignment * manager.alignment
        for end in range(last, max(0, last - 2 * manager.alignment), -manager.alignment):
            keys = manager.keys_of_prefix(request, end)
            if all(self._is_known(key) for group_keys in keys for key in group_keys):
                return end, keys
        return 0, []

    def close(self) -> None:
        """The engine stops."""
        self._connector.close()

    def release(self, request: Request) -> None:
        """The request has been admitted, or has ended: its loaded prefix is not held any more."""
        self._connector.settled(request.request_id)
        held = self._held.pop(request, None)
        if held is not None:
            self._pool.unpin(held)

    def release_all(self) -> bool:
        """Let loaded prefixes be evicted, because blocks are needed. False if there were none."""
        requests = list(self._held)
        for request in requests:
            self.release(request)
        return bool(requests)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """A request ends, and has given back its blocks."""
        if request.status is not RequestStatus.RUNNING:
            self.release(request)
        elif reason != "error":
            self.store(request)
        if request.kv_transfer is not None and reason in ("abort", "error"):
            self._lent_early.pop(request, None)
            self._connector.ended(request.request_id)

    def store(self, request: Request) -> None:
        """Store what the connector wants of a request that has ended. Its blocks are freed."""
        manager, pool = self._manager, self._pool
        keys = [[key for key in group_keys if self._is_known(key)] for group_keys in manager.keys_left(request)]
        cached_share = len(pool.cached) / pool.num_blocks
        wanted = set(self._connector.finished(request.request_id, [key for group_keys in keys for key in group_keys], cached_share))
        for group, group_keys in enumerate(keys):
            stored = [key for key in group_keys if key in wanted]
            blocks = [block for key in stored for block in pool.entry(key)]
            if stored and pool.num_free - sum(block.is_free for block in blocks) >= manager.num_kept_free:
                self._begin(group, stored, [block.block_id for block in blocks], None)

    def _is_known(self, key: bytes) -> bool:
        """Whether the cache has a key's content, and it is known that it was computed."""
        block = self._pool.cached.get(key)
        return block is not None and block.step <= self._last_known_step

    def _store_evicted(self, block: KVCacheBlock) -> bool:
        """`BlockPool.on_evict`."""
        key, manager, pool = block.key, self._manager, self._pool
        assert key is not None
        entry = [one.block_id for one in pool.entry(key)]
        has_room = self._num_evicted + len(entry) <= pool.num_blocks // EVICTED_FRACTION
        if not has_room or pool.num_free - len(entry) < manager.num_kept_free or not self._is_known(key):
            return False
        if not self._connector.evicted(key):
            return False
        self._begin(group_of_key(key), [key], entry, None, is_eviction=True)
        return True

    def _begin(
        self, group: int, keys: list[bytes], block_ids: list[int], load: _Load | None, *, is_eviction: bool = False, is_lease: bool = False
    ) -> BlockTransfer:
        transfer = BlockTransfer(transfer_id=self._next_id, group=group, keys=keys, block_ids=block_ids)
        self._next_id += 1
        transfer.meta = self._connector.prepare(transfer, is_load=load is not None)
        self._pool.pin(block_ids)
        self._num_evicted += len(block_ids) * is_eviction
        is_long = is_lease or (load is not None and load.is_early)
        deadline = self._clock() + (self._connector.lease_seconds if is_long else self._connector.deadline_seconds)
        one = self._in_flight[transfer.transfer_id] = _InFlight(transfer, load, deadline, is_eviction, is_lease=is_lease)
        if is_lease:
            self._leases[transfer.transfer_id] = one
        (self._new.stores if load is None else self._new.loads).append(transfer)
        return transfer

    def take(self) -> StepTransfers | None:
        """What the step that is being scheduled begins; None for nothing."""
        if not self.has_orders:
            return None
        new, self._new = self._new, StepTransfers()
        return new

    def end_overdue(self) -> None:
        """Give up transfers that have taken too long, and end leases that other engines need no more, or that have lasted too long."""
        now = self._clock() if len(self._in_flight) > self._num_overdue else 0.0
        if self._leases:
            due = [transfer_id for transfer_id, one in self._leases.items() if now > one.deadline]
            for transfer_id in (*due, *self._connector.take_released()):
                if (lease := self._leases.pop(transfer_id, None)) is not None:
                    lease.is_ending = True
                    self._new.cancelled.append(transfer_id)
        for transfer_id, one in self._in_flight.items():
            if one.is_overdue or one.is_lease or now <= one.deadline:
                continue
            one.is_overdue = True
            self._num_overdue += 1
            self._new.cancelled.append(transfer_id)
            what = "store" if one.load is None else "load"
            seconds = self._connector.lease_seconds if one.load is not None and one.load.is_early else self._connector.deadline_seconds
            reason = f"The {what} of {len(one.transfer.block_ids)} blocks took more than {seconds:g} seconds."
            logger.warning("%s", reason)
            self._connector.update(FinishedTransfers(failed={transfer_id: reason}))
            if one.load is not None:
                one.load.error = one.load.error or reason
                self._end_load(one.load)

    def update(
        self, ended: FinishedTransfers | None, step: int, num_prompt_tokens: int, seconds: float, chunks: Sequence[Chunk] = ()
    ) -> None:
        """Take what the ranks are through with. The results of all steps up to `step` are known, which took so many seconds. chunks: of
        prompts that it computed, which other engines may fetch already.
        """
        self._last_known_step = step
        for chunk in chunks:
            request = chunk.request
            if request.kv_transfer is not None and not chunk.samples and request.status is RequestStatus.RUNNING:
                self.lend_early(request, chunk.end)
        if num_prompt_tokens:
            self._connector.observe_step(num_prompt_tokens, seconds)
        if ended is not None:
            self.end(ended)

    def end(self, ended: FinishedTransfers) -> None:
        """Every rank is through with these transfers."""
        known = FinishedTransfers()
        for transfer_id in ended.finished:
            if self._end(transfer_id, None):
                known.finished.append(transfer_id)
        for transfer_id, reason in ended.failed.items():
            if self._end(transfer_id, reason):
                known.failed[transfer_id] = reason
        self._connector.update(known)

    def _end(self, transfer_id: int, error: str | None) -> bool:
        """False if nobody waits for the transfer any more."""
        one = self._in_flight.pop(transfer_id, None)
        if one is None:
            return False
        self._leases.pop(transfer_id, None)
        block_ids, load = one.transfer.block_ids, one.load
        if load is None:
            self._num_evicted -= len(block_ids) * one.is_eviction
            ordered = block_ids if one.is_eviction or len(block_ids) > len(one.transfer.keys) else block_ids[::-1]
            self._pool.unpin(ordered, evict_next=one.is_eviction)
        else:
            load.num_left -= 1
            load.error = load.error or error
            if load.num_left == 0:
                self._end_load(load)
            self._pool.unpin(block_ids)
        self._num_overdue -= one.is_overdue
        return not one.is_overdue

    def _end_load(self, load: _Load) -> None:
        """All its transfers have ended, or one is overdue: the requests that wait go on."""
        if load.is_done.done():
            return
        for transfer in load.transfers:
            for key in transfer.keys:
                del self._loading[key]
            if load.error is None:
                self._manager.publish(transfer.group, load.request, transfer.keys, transfer.block_ids)
        if load.error is not None and not load.is_early:
            for request in load.waiting:
                request.may_load = False
            for request in (load.request, *load.waiting):
                request.was_refused_load = True
        if load.error is None and load.request.status is RequestStatus.WAITING:
            self._held[load.request] = load.held
            load.request.loaded_tokens = load.num_tokens
        else:
            self._pool.unpin(load.held)
        load.is_done.set_result(None)

    def reset(self) -> None:
        """What is cached is no longer valid, nor what is being loaded or stored."""
        for load in set(self._loading.values()):
            load.error = load.error or "The prefix cache was reset."
        self._connector.reset()

    def forget(self) -> None:
        """The ranks stop all transfers. No request is left."""
        stopped = FinishedTransfers(failed=dict.fromkeys(self._in_flight, "The engine went to sleep."))
        self._new = StepTransfers()
        self.end(stopped)


def _shared_out(num_tokens: int, tiers: dict[str, int]) -> dict[str, int]:
    """Tokens by tier, in proportion to the keys that each tier has."""
    shares, num_keys = {}, 0
    for tier, count in tiers.items():
        begin = num_tokens * num_keys // sum(tiers.values())
        num_keys += count
        shares[tier] = num_tokens * num_keys // sum(tiers.values()) - begin
    return shares

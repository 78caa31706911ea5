"""`Router`: sends a request to the least loaded replica, or to one that has more of the prompt in its prefix cache.

Load is a share of a replica's capacity: requests in flight divided by the number that can run at once, plus the used part
of the KV cache (what the replica last reported, or the prompts sent to it, whichever is larger). A replica that was sent
the beginning of the prompt before counts as less loaded, by AFFINITY times the share of the prompt that it has seen. So a
prompt returns to its replica, and a prefix that all requests share spreads as replicas fill up. A request never waits for
a batch slot while another replica has one free. Replicas that publish events tell what they have, also from other clients'
prompts, and what they have lost.

Where all batch slots are taken, a replica gets a few requests more, which then start without a round trip to the client
(AHEAD). For any more there is no room: the client holds them back until a replica has room again. A replica that reports
waiting requests has no more slots than it uses, because its KV cache is full or its steps are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from compile_and_serve.runtime.kv_events.wire import DEVICE, AllBlocksCleared, BlockStored, Event
from compile_and_serve.runtime.messages import EngineRequest, EngineStats
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys, root_key

AFFINITY = 0.125  # of a replica's capacity
AHEAD = 8  # one request for this many batch slots, and one; more than the scheduler gives free slots to at once
MAX_HASHED_BLOCKS = 256  # of a prompt; enough to find the replica that holds its prefix


@dataclass(slots=True)
class _Replica:
    requests: dict[str, int] = field(default_factory=dict)  # in flight → prompt tokens
    prompt_tokens: int = 0  # of the requests in flight
    num_others: int = 0  # sequences of other clients, as last reported, like what follows
    kv_cache_usage: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_routed: int = 0  # not reported
    is_down: bool = False  # not reported, either

    @property
    def num_sequences(self) -> int:
        """Sequences of all clients."""
        return len(self.requests) + self.num_others


class Router:
    """Call `route` for each request, `finish` when it ends, and `observe` for each replica's stats.

    max_num_seqs: sequences that one replica can run at once. num_blocks: KV blocks of one replica; 0: it has no cache. block_size: tokens
    per block. enable_prefix_caching: whether replicas cache prompts. max_waiting: requests that a replica accepts beyond
    max_num_seqs; None is no limit.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        max_waiting: int | None = None,
    ) -> None:
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._replica_of: dict[str, int] = {}
        self._max_num_seqs = max_num_seqs
        self._limits = [max_num_seqs] + ([] if max_waiting is None else [max_num_seqs + max_waiting])
        self._max_ahead = max_num_seqs // AHEAD + 1
        if max_waiting is not None:
            self._max_ahead = min(self._max_ahead, max_waiting)
        self._block_size = block_size
        self._has_caches = enable_prefix_caching
        self._num_tokens = num_blocks * block_size
        # Block hash → bit mask of the replicas that were sent the block, least recently sent first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._max_seen = num_replicas * num_blocks

    def has_room(self, request: EngineRequest) -> bool:
        """Whether a replica would start the request now, or soon. More sequences than a replica can run always have room: they wait in
        any case.
        """
        num_sequences = len(request.request_ids)
        return num_sequences > self._max_num_seqs or any(
            not one.num_sequences or one.num_sequences + num_sequences <= self._num_slots(one) + self._max_ahead
            for one in self._replicas
            if not one.is_down
        )

    def _num_slots(self, replica: _Replica) -> int:
        return min(self._max_num_seqs, replica.num_running) if replica.num_waiting else self._max_num_seqs

    def accepts(self, request: EngineRequest, num_held: int) -> bool:
        """Whether the replicas' queues together would take the request behind `num_held` sequences that are held back."""
        if len(self._limits) == 1:
            return True
        living = [one for one in self._replicas if not one.is_down]
        in_flight = sum(one.num_sequences for one in living) + num_held + len(request.request_ids)
        return in_flight <= len(living) * self._limits[1]

    def route(self, request: EngineRequest, among: Sequence[int] | None = None) -> int:
        """Choose a replica for all sequences of a request and return its index. Each counts as in flight there until its
        `finish`. among: the replicas that may be chosen; None: all.
        """
        request_ids = request.request_ids
        hashes = self._hashes(request)
        num_cached = self._cached_prefixes(hashes)
        # Ties go to the replica with the fewest requests so far, so that idle replicas fill their caches evenly.
        chosen = min(
            among or self._candidates(len(request_ids)),
            key=lambda r: (self.load(r) - AFFINITY * num_cached[r] / max(1, len(hashes)), self._replicas[r].num_routed),
        )
        self._assign(request, chosen, hashes)
        return chosen

    def assign(self, request: EngineRequest, index: int) -> None:
        """As `route`, where somebody else has chosen the replica."""
        self._assign(request, index, self._hashes(request))

    def _assign(self, request: EngineRequest, chosen: int, hashes: list[bytes]) -> None:
        replica, request_ids = self._replicas[chosen], request.request_ids
        replica.num_routed += len(request_ids)
        share, rest = divmod(len(request.prompt_token_ids), len(request_ids))  # the sequences share their prompt
        for number, request_id in enumerate(request_ids):
            replica.requests[request_id] = num_tokens = share + (number < rest)
            replica.prompt_tokens += num_tokens
            self._replica_of[request_id] = chosen
        self._record_blocks(hashes, chosen)

    def load(self, index: int) -> float:
        """The used share of a replica's capacity; may exceed 1."""
        replica = self._replicas[index]
        if not replica.num_sequences:
            return 0.0  # its last report may be older than the last abort
        cache = max(replica.kv_cache_usage, replica.prompt_tokens / self._num_tokens if self._num_tokens else 0.0)
        return replica.num_sequences / self._max_num_seqs + cache

    def replica_of(self, request_id: str) -> int | None:
        """Index of the replica where the request is in flight, or None."""
        return self._replica_of.get(request_id)

    def requests_of(self, index: int) -> list[str]:
        """Ids of a replica's requests in flight."""
        return list(self._replicas[index].requests)

    def finish(self, request_id: str) -> None:
        """A request has ended. Unknown ids are ignored."""
        index = self._replica_of.pop(request_id, None)
        if index is not None:
            replica = self._replicas[index]
            replica.prompt_tokens -= replica.requests.pop(request_id)

    def set_down(self, index: int, is_down: bool) -> None:
        """A replica takes no requests, or takes them again, with empty caches."""
        replica = self._replicas[index]
        replica.is_down = is_down
        replica.num_others = replica.num_running = replica.num_waiting = 0
        replica.kv_cache_usage = 0.0
        self.observe_events(index, [AllBlocksCleared()])

    def observe(self, index: int, stats: EngineStats, num_others: int = 0) -> None:
        """Record a replica's stats. num_others: its unfinished sequences of other clients."""
        replica = self._replicas[index]
        replica.num_others = num_others
        replica.kv_cache_usage = stats.kv_cache_usage
        replica.num_running, replica.num_waiting = stats.num_running, stats.num_waiting

    def observe_events(self, index: int, events: Sequence[Event]) -> None:
        """Record what a replica has cached and forgotten on its device."""
        mask, seen = 1 << index, self._seen
        for event in events:
            if isinstance(event, AllBlocksCleared):
                gone = [block for block, holders in seen.items() if holders & mask]
            elif event.medium != DEVICE or event.group_idx != 0:  # the keys of a prompt are those of the first group
                continue
            elif isinstance(event, BlockStored):
                self._record_blocks(event.block_hashes, index)
                continue
            else:
                gone = event.block_hashes
            for block in gone:
                holders = seen.get(block, 0) & ~mask
                if holders:
                    seen[block] = holders
                else:
                    seen.pop(block, None)

    def forget_prefixes(self) -> None:
        """Forget all prompts, after the replicas have reset their prefix caches."""
        self._seen.clear()

    def _candidates(self, num_sequences: int) -> Sequence[int]:
        """Replicas with free batch slots for all sequences, else those with room ahead or in the queue, else all."""
        for limit in (self._limits[0], self._limits[0] + self._max_ahead, *self._limits[1:]):
            limit -= num_sequences
            if available := [r for r, replica in enumerate(self._replicas) if replica.num_sequences <= limit and not replica.is_down]:
                return available
        return [r for r, replica in enumerate(self._replicas) if not replica.is_down] or range(len(self._replicas))

    def _hashes(self, request: EngineRequest) -> list[bytes]:
        if not self._has_caches or request.sampling_params.prompt_logprobs is not None:  # the engine bypasses the cache
            return []
        size = self._block_size
        num_blocks = min(len(request.prompt_token_ids) // size, MAX_HASHED_BLOCKS)
        keys: list[bytes] = []
        root = root_key(request.cache_salt, request.prefix_key, request.step_data)
        extend_keys(keys, root, request.prompt_token_ids, size, num_blocks, request.contents())
        return keys

    def _cached_prefixes(self, hashes: list[bytes]) -> list[int]:
        """For each replica, the number of leading blocks that it was sent before."""
        num_cached = [0] * len(self._replicas)
        holders = (1 << len(self._replicas)) - 1
        for number, block in enumerate(hashes, start=1):
            holders &= self._seen.get(block, 0)
            if not holders:
                break
            for index in range(len(num_cached)):
                if holders >> index & 1:
                    num_cached[index] = number
        return num_cached

    def _record_blocks(self, hashes: list[bytes], chosen: int) -> None:
        for block in reversed(hashes):  # as in the cache, later blocks are evicted before the blocks that they continue
            self._seen[block] = self._seen.get(block, 0) | 1 << chosen
            self._seen.move_to_end(block)
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

"""`Router`: which replica gets a request. The one with the least load, unless another has more of the prompt in its prefix cache.

Load is a share of a replica's capacity: requests in flight of those that can run at once, plus the KV cache in use or about
to be (its own last word, or the prompts that were sent to it, whichever is more). A replica that was sent the beginning of the
prompt before counts as less loaded by AFFINITY times the part of the prompt that it has seen; so a prompt returns to its
replica, and a prefix that everybody shares spreads over all as they fill up. Nobody waits for a seat where another has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from compile_and_serve.runtime.messages import EngineRequest, EngineStats
from compile_and_serve.runtime.scheduler.kv_cache_manager import hash_blocks, root_hash

AFFINITY = 0.125  # of a replica's capacity
MAX_HASHED_BLOCKS = 256  # of a prompt: whoever has so many has enough


@dataclass(slots=True)
class _Replica:
    requests: dict[str, int] = field(default_factory=dict)  # in flight → prompt tokens
    prompt_tokens: int = 0  # of those in flight
    kv_cache_usage: float = 0.0
    num_routed: int = 0


class Router:
    """`route` a request, `finish` it, and `observe` what replicas say. max_num_seqs, num_blocks: of each replica.

    block_size: tokens of a block. enable_prefix_caching: whether replicas remember prompts. max_waiting: requests that a replica takes
    beyond max_num_seqs.
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
        self._block_size = block_size
        self._has_caches = enable_prefix_caching
        self._num_tokens = num_blocks * block_size
        # Which replicas were sent a block (bit r: replica r), the least recently sent first.
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._max_seen = num_replicas * num_blocks

    def route(self, request: EngineRequest) -> int:
        """Choose a replica; the request counts as in flight there until `finish`."""
        prompt = request.prompt_token_ids
        hashes = self._hashes(request)
        found = self._found(hashes)
        # Of equals the one that got the fewest requests so far, so that idle replicas fill their caches evenly.
        chosen = min(
            self._candidates(),
            key=lambda r: (self.load(r) - AFFINITY * found[r] / max(1, len(hashes)), self._replicas[r].num_routed),
        )
        replica = self._replicas[chosen]
        replica.requests[request.request_id] = len(prompt)
        replica.prompt_tokens += len(prompt)
        replica.num_routed += 1
        self._replica_of[request.request_id] = chosen
        self._remember(hashes, chosen)
        return chosen

    def load(self, index: int) -> float:
        """How much of a replica's capacity is taken; may be more than 1."""
        replica = self._replicas[index]
        if not replica.requests:
            return 0.0  # its last word may be older than the last abort
        cache = max(replica.kv_cache_usage, replica.prompt_tokens / self._num_tokens)
        return len(replica.requests) / self._max_num_seqs + cache

    def replica_of(self, request_id: str) -> int | None:
        """Where a request is in flight; None for one that is not."""
        return self._replica_of.get(request_id)

    def requests_of(self, index: int) -> list[str]:
        """A replica's requests in flight."""
        return list(self._replicas[index].requests)

    def finish(self, request_id: str) -> None:
        """A request is over; unknown ones are ignored."""
        index = self._replica_of.pop(request_id, None)
        if index is not None:
            replica = self._replicas[index]
            replica.prompt_tokens -= replica.requests.pop(request_id)

    def observe(self, index: int, stats: EngineStats) -> None:
        """Take in what a replica says after a step."""
        self._replicas[index].kv_cache_usage = stats.kv_cache_usage

    def forget_prefixes(self) -> None:
        """The replicas' prefix caches were emptied."""
        self._seen.clear()

    def _candidates(self) -> Sequence[int]:
        """Replicas with a free seat; if there is none, with room to wait; else all."""
        for limit in self._limits:
            if below := [r for r, replica in enumerate(self._replicas) if len(replica.requests) < limit]:
                return below
        return range(len(self._replicas))

    def _hashes(self, request: EngineRequest) -> list[bytes]:
        if not self._has_caches or request.sampling_params.prompt_logprobs is not None:  # it does not read the cache
            return []
        size = self._block_size
        num_blocks = min(len(request.prompt_token_ids) // size, MAX_HASHED_BLOCKS)
        return hash_blocks(root_hash(request.cache_salt), request.prompt_token_ids[: num_blocks * size], size)

    def _found(self, hashes: list[bytes]) -> list[int]:
        """For each replica, how many leading blocks it was sent before."""
        found = [0] * len(self._replicas)
        having = (1 << len(self._replicas)) - 1
        for number, block in enumerate(hashes, start=1):
            having &= self._seen.get(block, 0)
            if not having:
                break
            for index in range(len(found)):
                if having >> index & 1:
                    found[index] = number
        return found

    def _remember(self, hashes: list[bytes], chosen: int) -> None:
        for block in reversed(hashes):  # as in the cache, a tail goes before what it continues
            self._seen[block] = self._seen.get(block, 0) | 1 << chosen
            self._seen.move_to_end(block)
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

"""`TierIndex`: the scheduler's side of the tiers. It knows what the host's memory and the disk have, and decides what goes there.

Content is stored when its request has ended, once the device's blocks are half full of what may be needed again: a long prompt evicts so
many blocks at once that they could not all be stored in time. What is evicted and was not stored before is stored then, as far as there is
time. With a disk, all that requests leave is stored, so that a restart finds it. A preempted request's content goes the same way as other
evicted content, and is loaded when the request goes on. Where measurements say that computing a prefix again takes less time than loading
it, it is not loaded.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from compile_and_serve.runtime.connector.connector import PrefixQuery, SchedulerConnector
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers
from compile_and_serve.runtime.connector.tiers.content_store import ContentStore
from compile_and_serve.runtime.connector.tiers.host_pages import HostPages
from compile_and_serve.runtime.connector.tiers.orders import TierOrders
from compile_and_serve.runtime.kv_events.wire import HOST

logger = logging.getLogger(__name__)

Tier = Literal["host", "disk"]
Place = Tier | Literal["device"]
_KEPT_TIMES = 1000
_MIN_PROMPT_TOKENS = 64  # of a step whose rate counts
_NEW_SHARE = 0.2  # of a new measurement, in a mean of which the older ones fade
_FULL_SHARE = 0.5
_MAX_ENDS = 64  # of prefixes that are looked up in a store, where groups keep the last tokens alone
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class _Moved:
    """A transfer in flight. landing: keys whose content will be on the host; the others of `keys` are read there."""

    keys: list[bytes]
    landing: set[bytes]
    num_blocks: int
    tier: Tier
    is_load: bool
    began: float


@dataclass(slots=True)
class _Counts:
    """Of a tier, since the start. times: seconds of the last transfers."""

    loaded_blocks: int = 0
    stored_blocks: int = 0
    failures: int = 0
    keys_per_second: float = 0.0
    last_load_end: float = 0.0
    load_times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    store_times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))


class TierIndex(SchedulerConnector):
    """block_bytes: of a block, over all ranks. disk: None: there is none; it is rank 0's, and only asked what it has."""

    def __init__(self, host: HostPages, disk: ContentStore | None, block_bytes: int) -> None:
        self._host, self._disk, self._block_bytes = host, disk, block_bytes
        self._moved: dict[int, _Moved] = {}
        self._keep: set[bytes] = set()  # that the last match promised
        self._found: dict[bytes, Place | None] = {}  # by the last match
        self._counts: dict[Tier, _Counts] = {"host": _Counts(), "disk": _Counts()}
        self._prompt_rate = 0.0  # tokens per second
        self._epoch = b""  # behind the keys of files: what was forgotten is not found any more, by nobody
        self._quantiles: dict[str, float] = {}
        self._quantiles_at = 0.0
        host.on_change = self._note

    def _note(self, key: bytes, is_there: bool) -> None:
        if self.events is not None and is_there:
            self.events.stored_elsewhere([key], HOST)
        elif self.events is not None:
            self.events.removed(key, HOST)

    def match(self, query: PrefixQuery) -> int:
        begin = query.num_cached_tokens
        self._look_up(query)
        found = self._found = {}
        for keys in query.keys_at(begin):
            found |= dict.fromkeys(keys, "device")
        for end in range(self._bound(query, found), begin, -query.alignment):
            wanted = [key for keys in query.keys_at(end) for key in keys]
            if all(self._place(key, found) is not None for key in wanted):
                self._keep = set(wanted)
                return end - begin if self._pays([found[key] for key in wanted], end - begin) else 0
        return 0

    def _look_up(self, query: PrefixQuery) -> None:
        """Ask the store at once for all that a prefix may consist of: of groups that keep all tokens the blocks of the longest one, of
        others those at the ends of several.
        """
        if self._disk is None or query.max_tokens <= query.num_cached_tokens:
            return
        end, step = query.max_tokens, query.alignment
        shorter, longest = query.keys_at(end - step), query.keys_at(end)
        wanted = dict.fromkeys(key for keys in longest for key in keys)
        partial = [group for group, (few, keys) in enumerate(zip(shorter, longest, strict=True)) if keys[: len(few)] != few]
        for other in range(end - step, query.num_cached_tokens, -step)[:_MAX_ENDS] if partial else ():
            at = query.keys_at(other)
            wanted |= dict.fromkeys(key for group in partial for key in at[group])
        self._disk.look_up([key + self._epoch for key in wanted if not self._host.is_known(key)])

    def tiers_of(self, keys: Iterable[bytes]) -> dict[str, int]:
        return Counter(place for key in keys if (place := self._found.get(key)) is not None)

    def _bound(self, query: PrefixQuery, found: dict[bytes, Place | None]) -> int:
        """Tokens that no prefix exceeds: of a group that needs the blocks of all tokens, the leading blocks that there are."""
        end, alignment = query.max_tokens, query.alignment
        bound = end
        for shorter, keys in zip(query.keys_at(end - alignment), query.keys_at(end), strict=True):
            if len(keys) > len(shorter) and keys[: len(shorter)] == shorter:
                leading = next((number for number, key in enumerate(keys) if self._place(key, found) is None), len(keys))
                bound = min(bound, leading * (end // len(keys)) // alignment * alignment)
        return bound

    def _place(self, key: bytes, found: dict[bytes, Place | None]) -> Place | None:
        """Where a content is. found: what is known, which is filled in."""
        if key not in found:
            found[key] = "host" if key in self._host else "disk" if self._is_on_disk(key) else None
        return found[key]

    def _is_on_disk(self, key: bytes) -> bool:
        return self._disk is not None and not self._host.is_known(key) and self._disk.has(key + self._epoch)

    def _pays(self, places: Sequence[Place | None], num_tokens: int) -> bool:
        """Whether loading takes less time than computing so many tokens, as far as both were measured."""
        seconds = 0.0
        for tier, counts in self._counts.items():
            if count := places.count(tier):
                if not counts.keys_per_second:
                    return True
                seconds += count / counts.keys_per_second
        return not self._prompt_rate or seconds <= num_tokens / self._prompt_rate

    def observe_step(self, num_prompt_tokens: int, seconds: float) -> None:
        if num_prompt_tokens >= _MIN_PROMPT_TOKENS and seconds > 0:
            rate = num_prompt_tokens / seconds
            self._prompt_rate += (rate - self._prompt_rate) * (_NEW_SHARE if self._prompt_rate else 1.0)

    def evicted(self, key: bytes) -> bool:
        return not self._host.is_known(key) and not (self._disk is not None and self._disk.has(key + self._epoch))

    def finished(self, request_id: str, keys: Sequence[bytes], cached_share: float) -> Collection[bytes]:
        if self._disk is None and cached_share < _FULL_SHARE:
            return ()
        return [key for key in keys if self.evicted(key)]

    def prepare(self, transfer: BlockTransfer, *, is_load: bool) -> bytes:
        host, size = self._host, transfer.blocks_per_key
        pages: list[int] = []
        from_disk: list[bool] = []
        landing: set[bytes] = set()
        done: list[bytes] = []
        for key in transfer.keys:
            is_there = is_load and key in host
            own = host.use(key) if is_there else host.allocate(key, size, self._keep)
            if own is None:
                for other in done:
                    host.release(other, is_whole=False)
                return b""  # the worker's side ends it
            done.append(key)
            pages += own
            from_disk.append(not is_there)
            if not is_there:
                landing.add(key)
        tier: Tier = "disk" if is_load and any(from_disk) else "host"
        self._moved[transfer.transfer_id] = _Moved(transfer.keys, landing, len(transfer.block_ids), tier, is_load, time.monotonic())
        orders = TierOrders(pages, from_disk if is_load else [], self._disk is not None and not is_load, self._epoch)
        return msgspec.msgpack.encode(orders)

    def update(self, transfers: FinishedTransfers) -> None:
        loads: list[_Moved] = []
        for transfer_id in transfers.finished:
            if (moved := self._moved.pop(transfer_id, None)) is not None:
                self._count(moved)
                if moved.is_load:
                    loads.append(moved)
                for key in moved.keys:
                    self._host.release(key, is_whole=True)
        for tier, counts in self._counts.items():
            self._measure(counts, [one for one in loads if one.tier == tier])
        for transfer_id in transfers.failed:
            moved = self._moved.pop(transfer_id, None)
            if moved is None:
                continue
            self._counts[moved.tier].failures += 1
            is_overdue = time.monotonic() - moved.began > self.deadline_seconds
            for key in moved.keys:
                if is_overdue and key in moved.landing:
                    self._host.set_aside(key)
                else:
                    self._host.release(key, is_whole=False)

    def _count(self, moved: _Moved) -> None:
        counts, seconds = self._counts[moved.tier], max(time.monotonic() - moved.began, 1e-6)
        if not moved.is_load:
            counts.stored_blocks += moved.num_blocks
            counts.store_times.append(seconds)
            return
        counts.loaded_blocks += moved.num_blocks
        counts.load_times.append(seconds)

    def _measure(self, counts: _Counts, loads: Sequence[_Moved]) -> None:
        """Loads have ended at the same time. They share the way with others, so only the time since the last end counts."""
        if loads:
            now = time.monotonic()
            begin = max(counts.last_load_end, min(one.began for one in loads))
            rate = sum(len(one.keys) for one in loads) / max(now - begin, 1e-6)
            counts.keys_per_second += (rate - counts.keys_per_second) * (_NEW_SHARE if counts.keys_per_second else 1.0)
            counts.last_load_end = now

    def reset(self) -> None:
        self._host.forget()
        self._epoch = secrets.token_bytes(8)

    def stats(self) -> dict[str, float]:
        host = self._host
        stats: dict[str, float] = {"host_usage": 1.0 - host.num_free / max(1, host.num_pages), "host_evicted": float(host.num_evicted)}
        for tier, counts in self._counts.items():
            if tier == "host" or self._disk is not None:
                stats[f"{tier}_loaded_bytes"] = float(counts.loaded_blocks * self._block_bytes)
                stats[f"{tier}_stored_bytes"] = float(counts.stored_blocks * self._block_bytes)
                stats[f"{tier}_failures"] = float(counts.failures)
        now = time.monotonic()
        if now - self._quantiles_at > 1.0:
            self._quantiles_at, self._quantiles = now, self._quantiles_of_times()
        return stats | self._quantiles | ({} if self._disk is None else self._disk.stats())

    def _quantiles_of_times(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for tier, counts in self._counts.items():
            for what, times in (("load", counts.load_times), ("store", counts.store_times)):
                ordered = sorted(times)
                for quantile in _QUANTILES if ordered else ():
                    found[f"{tier}_{what}_seconds_p{round(100 * quantile)}"] = ordered[int(quantile * (len(ordered) - 1))]
        return found

"""`MooncakeStore`: contents of the KV cache in a Mooncake store, whose memory lies on several hosts. Every engine with the same fingerprint
finds them.

A content is an object: a checksum, then the pages of one rank. The name says all that it depends on. An object whose checksum is wrong is
not used: the host's pages may be written to while they are put.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Protocol

import xxhash

from compile_and_serve.runtime.connector.tiers.content_store import Buffer

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_MAX_KNOWN = 1 << 20  # keys that are remembered
_PAUSE_SECONDS = 10.0  # without look-ups after one that failed or took too long
_SLOW_SECONDS = 0.25  # of a look-up: the scheduler waits for it
_KEPT_TIMES = 1000
_QUANTILES = (0.5, 0.9, 0.99)


class ObjectStore(Protocol):
    """What is used of `MooncakeDistributedStore`. Methods that return an int return 0 if they have succeeded."""

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def put_parts(self, key: str, *parts: Any) -> int: ...

    def get_buffer(self, key: str) -> Any: ...

    def remove(self, key: str) -> int: ...


class MooncakeStore:
    """A `ContentStore`. fingerprint: 32 bytes, of all that contents depend on beside their keys. rank: whose part is read and written, of
    `num_ranks`. A content is there once all ranks' parts are.
    """

    def __init__(self, store: ObjectStore, fingerprint: bytes, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._prefix = f"cas-{fingerprint.hex()[:32]}"
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._counts = dict.fromkeys(("lookups", "lookup_keys", "lookup_hits", "lookup_errors"), 0)
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)

    def look_up(self, keys: Sequence[bytes]) -> None:
        """One question for all keys, of all groups and ranks."""
        now = time.monotonic()
        if not keys or now < self._paused_until:
            self._forget(keys)
            return
        names = [self._name(key, rank) for key in keys for rank in range(self._num_ranks)]
        self._counts["lookups"] += 1
        self._counts["lookup_keys"] += len(keys)
        try:
            found = self._store.batch_is_exist(names)
        except Exception as error:  # the library's own
            found = []
            logger.debug("A look-up failed: %s", error)
        seconds = time.monotonic() - now
        self._times.append(seconds)
        if len(found) != len(names) or min(found) < 0 or seconds > _SLOW_SECONDS:
            self._counts["lookup_errors"] += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            what = f"took {seconds:.2f} seconds" if len(found) == len(names) and min(found) >= 0 else "failed"
            logger.warning("A look-up in the Mooncake store %s: prompts are computed without it for %g seconds.", what, _PAUSE_SECONDS)
            self._forget(keys)
            return
        size = self._num_ranks
        there = [key for number, key in enumerate(keys) if all(found[number * size : (number + 1) * size])]
        self._counts["lookup_hits"] += len(there)
        self._forget(keys)
        self._remember(there)

    def has(self, key: bytes) -> bool:
        """As the last look-up knew."""
        return key in self._known

    def read(self, key: bytes, parts: Sequence[Buffer]) -> None:
        name = self._name(key, self._rank)
        try:
            content = self._store.get_buffer(name)
        except Exception as error:
            raise OSError(f"The Mooncake store did not answer: {error}.") from error
        size = sum(map(len, parts))
        if content is None:
            raise OSError("The Mooncake store has lost a content since it was looked up.")
        view = memoryview(content).cast("B")
        if len(view) != _CHECKSUM_BYTES + size:
            raise OSError(f"A content in the Mooncake store has {len(view)} bytes, not {_CHECKSUM_BYTES + size}.")
        begin = _CHECKSUM_BYTES
        for part in parts:
            part[:] = view[begin : begin + len(part)]
            begin += len(part)
        if bytes(view[:_CHECKSUM_BYTES]) != _checksum(parts):
            self.discard(name)
            raise OSError("A content in the Mooncake store is damaged, so it is not used.")

    def write_unpublished(self, key: bytes, parts: Sequence[Buffer]) -> str | None:
        """The object has its name at once; readers see by its checksum if it is wrong. The store keeps an object that it has. Which these
        are is not remembered here, because the store evicts.
        """
        name = self._name(key, self._rank)
        try:
            status = self._store.put_parts(name, _checksum(parts), *parts)
        except Exception as error:
            raise OSError(f"The Mooncake store did not answer: {error}.") from error
        if status != 0:
            raise OSError(f"The Mooncake store took no content: error {status}.")
        return name

    def publish(self, key: bytes, temporary: str) -> bool:
        return True

    def discard(self, temporary: str) -> None:
        try:
            self._store.remove(temporary)
        except Exception as error:
            logger.debug("%s was not removed: %s", temporary, error)

    def make_room(self) -> None:
        """The store evicts by itself."""

    def stats(self) -> dict[str, float]:
        found = {f"store_{name}": float(count) for name, count in self._counts.items()}
        times = sorted(self._times)
        for quantile in _QUANTILES if times else ():
            found[f"store_lookup_seconds_p{quantile * 100:.0f}"] = times[min(len(times) - 1, int(quantile * len(times)))]
        return found

    def _name(self, key: bytes, rank: int) -> str:
        return f"{self._prefix}-{rank}-{key.hex()}"

    def _remember(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._known |= dict.fromkeys(keys)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)


def _checksum(parts: Sequence[Buffer]) -> bytes:
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.digest()

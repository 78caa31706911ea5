"""`ResponseStore`: answers of `/v1/responses` that clients may fetch or continue. In memory, bounded in bytes and time."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

# Bytes of a stored response with its conversation. Decoding one holds up the event loop, and conversations grow with each response.
MAX_RESPONSE_BYTES = 4 << 20


class StoredResponse(msgspec.Struct):
    """A response, and the items of the conversation that it answers: those of earlier responses and of its own input."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    encoded: bytes
    stored: float
    item_ids: tuple[str, ...]


class ResponseStore:
    """Responses by owner and id. Each is dropped after `seconds`; to keep within `max_bytes`, the oldest of the owner with most bytes.

    tasks: those that generate background responses, by the response's id; up to max_background of each owner.
    owner: identifies the API key of a request; other keys' responses do not exist for it. clock: in seconds.
    """

    def __init__(
        self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic, *, max_background: int = sys.maxsize
    ) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._max_background = max_background
        self._num_background: Counter[str | None] = Counter()  # of each owner, in progress
        self._max_bytes = max_bytes
        self._max_response_bytes = min(max_bytes, MAX_RESPONSE_BYTES)
        self._seconds = seconds
        self._clock = clock
        # Of each owner, the oldest first.
        self._entries: defaultdict[str | None, OrderedDict[str, _Entry]] = defaultdict(OrderedDict)
        self._sizes: Counter[str | None] = Counter()  # bytes of each owner
        self._responses_of: defaultdict[str | None, dict[str, str]] = defaultdict(dict)  # item → newest response that has it

    def __len__(self) -> int:
        self._drop_expired()
        return sum(map(len, self._entries.values()))

    def may_begin(self, owner: str | None) -> bool:
        """Whether an owner may have one more response in the background."""
        return self._num_background[owner] < self._max_background

    def begin(self, owner: str | None) -> None:
        """One more of the owner's responses is in the background, until `end`."""
        self._num_background[owner] += 1

    def end(self, owner: str | None) -> None:
        """Undo `begin`."""
        self._num_background[owner] -= 1
        if not self._num_background[owner]:
            del self._num_background[owner]

    def owner_of(self, response_id: str) -> tuple[str | None] | None:
        """The owner of a stored response, in a tuple; None if there is no such response."""
        self._drop_expired()
        return next(((owner,) for owner, entries in self._entries.items() if response_id in entries), None)

    def put(self, response_id: str, owner: str | None, stored: StoredResponse) -> None:
        """Store a response, also in place of its earlier state. One that is too large is not kept."""
        self._remove(response_id, owner)
        self._drop_expired()
        item_ids = tuple(str(item["id"]) for item in _all_items(stored) if "id" in item)
        entry = _Entry(msgspec.json.encode(stored), self._clock(), item_ids)
        if len(entry.encoded) > self._max_response_bytes:
            logger.warning(
                "A response of %d bytes with its conversation is not stored: the limit is %d.", len(entry.encoded), self._max_response_bytes
            )
            return
        self._entries[owner][response_id] = entry
        self._responses_of[owner].update(dict.fromkeys(item_ids, response_id))
        self._sizes[owner] += len(entry.encoded)
        while self._sizes.total() > self._max_bytes:
            [(largest, _)] = self._sizes.most_common(1)
            self._remove_oldest(largest)
        if response_id not in self._entries[owner]:
            logger.warning("A response of %d bytes is not stored: its API key has most bytes.", len(entry.encoded))

    def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """The response, if it is stored and belongs to `owner`."""
        self._drop_expired()
        entry = self._entries[owner].get(response_id)
        return None if entry is None else msgspec.json.decode(entry.encoded, type=StoredResponse)

    def items(self, item_ids: Iterable[str], owner: str | None) -> dict[str, dict[str, Any]]:
        """Those of these items that are part of a stored conversation of `owner`, by id."""
        self._drop_expired()
        wanted = set(item_ids)
        found: dict[str, dict[str, Any]] = {}
        for response_id in {self._responses_of[owner].get(item_id, "") for item_id in wanted}:
            stored = self.get(response_id, owner)
            found |= {} if stored is None else {item["id"]: item for item in _all_items(stored) if item.get("id") in wanted}
        return found

    def delete(self, response_id: str, owner: str | None) -> bool:
        """Whether there was such a response."""
        self._drop_expired()
        return self._remove(response_id, owner)

    def _remove(self, response_id: str, owner: str | None) -> bool:
        entry = self._entries[owner].pop(response_id, None)
        if entry is not None:
            self._sizes[owner] -= len(entry.encoded)
            known = self._responses_of[owner]
            for item_id in entry.item_ids:
                if known.get(item_id) == response_id:
                    del known[item_id]
        return entry is not None

    def _remove_oldest(self, owner: str | None) -> None:
        self._remove(next(iter(self._entries[owner])), owner)

    def _drop_expired(self) -> None:
        end = self._clock() - self._seconds
        for owner, entries in self._entries.items():
            while entries and next(iter(entries.values())).stored <= end:
                self._remove_oldest(owner)


def _all_items(stored: StoredResponse) -> list[dict[str, Any]]:
    return [*stored.items, *stored.response.get("output", ())]

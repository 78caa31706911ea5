"""Requests that no replica has room for. They wait with the client of the replicas and go to the one that has room first.

A request that waits in a replica's queue stays there, even if another replica becomes free before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from compile_and_serve.runtime.messages import EngineRequest


class HeldRequests:
    """In the order of arrival."""

    def __init__(self) -> None:
        self._queue: deque[EngineRequest] = deque()
        self._living: dict[str, set[str]] = {}  # first sequence of a request → its sequences that are not aborted
        self._first_of: dict[str, str] = {}  # sequence → first sequence of its request

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def num_sequences(self) -> int:
        """Sequences that wait here."""
        return len(self._first_of)

    def add(self, request: EngineRequest) -> None:
        """Let a request wait behind all others."""
        self._queue.append(request)
        self._living[request.request_id] = set(request.request_ids)
        self._first_of.update(dict.fromkeys(request.request_ids, request.request_id))

    def first(self) -> EngineRequest:
        """The request that is next."""
        return self._queue[0]

    def pop(self) -> tuple[EngineRequest, list[str]]:
        """Take the next request. → it, and its sequences that were aborted meanwhile"""
        request = self._queue.popleft()
        living = self._living.pop(request.request_id)
        for request_id in living:
            del self._first_of[request_id]
        return request, [request_id for request_id in request.request_ids if request_id not in living]

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End sequences; a request without any left is dropped. → those of the ids that do not wait here"""
        others, is_empty = [], False
        for request_id in request_ids:
            first = self._first_of.pop(request_id, None)
            if first is None:
                others.append(request_id)
                continue
            self._living[first].discard(request_id)
            is_empty |= not self._living[first]
        if is_empty:
            self._queue = deque(request for request in self._queue if self._living[request.request_id])
            self._living = {first: living for first, living in self._living.items() if living}
        return others

    def drain(self) -> Iterator[tuple[EngineRequest, list[str]]]:
        """`pop` each request."""
        while self._queue:
            yield self.pop()

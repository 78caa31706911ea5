"""Requests that no replica has room for. They wait with the client of the replicas and go to the one that has room first.

A request that waits in a replica's queue stays there, even if another replica becomes free before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from compile_and_serve.runtime.messages import NOBODY, EngineRequest, Tenant


class TenantsInFlight:
    """The sequences that the replicas have of each API key. counts, tenants: by the key's name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tenants: dict[str, Tenant] = {}
        self._tenant_of: dict[str, str] = {}

    def add(self, request: EngineRequest) -> None:
        """A request was sent to a replica."""
        tenant = request.tenant or NOBODY
        self.tenants[tenant.name] = tenant
        self.counts[tenant.name] += len(request.request_ids)
        self._tenant_of.update(dict.fromkeys(request.request_ids, tenant.name))

    def remove(self, request_id: str) -> None:
        """A sequence has ended. Unknown ids are ignored."""
        name = self._tenant_of.pop(request_id, None)
        if name is not None:
            self.counts[name] -= 1
            if not self.counts[name]:
                del self.counts[name], self.tenants[name]


class HeldRequests:
    """Those of an API key are in the order of arrival. The next one is of the key that has the fewest sequences on the replicas, for its
    weight.
    """

    def __init__(self, in_flight: TenantsInFlight) -> None:
        self._in_flight = in_flight
        self._queues: dict[str, deque[EngineRequest]] = {}  # by the key's name
        self._living: dict[str, set[str]] = {}  # first sequence of a request → its sequences that are not aborted
        self._first_of: dict[str, str] = {}  # sequence → first sequence of its request

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def num_sequences(self) -> int:
        """Sequences that wait here."""
        return len(self._first_of)

    def has(self, tenant: Tenant) -> bool:
        """Whether requests of a key wait here."""
        return tenant.name in self._queues

    def add(self, request: EngineRequest) -> None:
        """Let a request wait behind all others of its key."""
        self._queues.setdefault((request.tenant or NOBODY).name, deque()).append(request)
        self._living[request.request_id] = set(request.request_ids)
        self._first_of.update(dict.fromkeys(request.request_ids, request.request_id))

    def first(self) -> EngineRequest:
        """The request that is next."""
        if len(self._queues) == 1:
            [queue] = self._queues.values()
            return queue[0]
        return min((queue[0] for queue in self._queues.values()), key=self._load)

    def _load(self, request: EngineRequest) -> float:
        tenant = request.tenant or NOBODY
        return self._in_flight.counts[tenant.name] / tenant.weight

    def pop(self) -> tuple[EngineRequest, list[str]]:
        """Take the next request. → it, and its sequences that were aborted meanwhile"""
        request = self.first()
        name = (request.tenant or NOBODY).name
        self._queues[name].popleft()
        if not self._queues[name]:
            del self._queues[name]
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
            kept = {name: deque(one for one in queue if self._living[one.request_id]) for name, queue in self._queues.items()}
            self._queues = {name: queue for name, queue in kept.items() if queue}
            self._living = {first: living for first, living in self._living.items() if living}
        return others

    def drain(self) -> Iterator[tuple[EngineRequest, list[str]]]:
        """`pop` each request."""
        while self._queues:
            yield self.pop()

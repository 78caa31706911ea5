"""`Intake`: requests that have come and that the engine has not added yet.

Adding a request takes the engine's host some tens of microseconds, and a key may send hundreds at once. While several API keys have
requests, a turn of the engine's loop spends ADD_SECONDS on adding, and takes one request of each key in turn: a step waits for no key's
flood, and a key's request does not wait for another's. While one key is alone, all are added at once.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable

from compile_and_serve.runtime.engine.engine_socket import Client
from compile_and_serve.runtime.messages import NOBODY, AddRequest

ADD_SECONDS = 0.0005

Added = tuple[Client, AddRequest]


class Intake:
    """add: adds a request for a client."""

    def __init__(self, add: Callable[[Client, AddRequest], None]) -> None:
        self._add = add
        self._waiting: OrderedDict[str, deque[Added]] = OrderedDict()  # by key; the next one first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: Client, message: AddRequest) -> None:
        """A request has come."""
        tenant = message.request.tenant or NOBODY
        self._waiting.setdefault(tenant.name, deque()).append((client, message))

    def take(self, unfinished: Collection[str]) -> None:
        """Add what this turn may. unfinished: keys that have requests in the engine."""
        is_limited = len(self._waiting.keys() | unfinished) > 1
        end = time.perf_counter() + ADD_SECONDS
        while self._waiting:
            self._add_next()
            if is_limited and time.perf_counter() >= end:
                return

    def take_all(self) -> None:
        """Add all that has come."""
        while self._waiting:
            self._add_next()

    def drop(self, client: Client, request_ids: Iterable[str]) -> None:
        """A client ends sequences. Those that were not added never are; of a request with several, all are added first."""
        if not self._waiting:
            return
        ended = set(request_ids)
        for key, queue in list(self._waiting.items()):
            kept: deque[Added] = deque()
            for owner, message in queue:
                names = message.request.request_ids
                if owner != client or ended.isdisjoint(names):
                    kept.append((owner, message))
                elif not ended.issuperset(names):
                    self._add(owner, message)
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]

    def _add_next(self) -> None:
        key, queue = next(iter(self._waiting.items()))
        client, message = queue.popleft()
        if queue:
            self._waiting.move_to_end(key)
        else:
            del self._waiting[key]
        self._add(client, message)

"""The waiting requests of a scheduler, by API key and user, and the counters that say which key is next.

The counters are those of "Fairness in Serving Large Language Models" (Sheng and others, OSDI 2024): a key's virtual counter is the cost of
what was computed for it, divided by its weight, and the key with the least of it is next. A key that waits again, after it did not, is
lifted to the others: it gets no credit for a time in which it wanted nothing. The users of a key have counters of their own below it.

While all requests are of one key and user, this is one heap and nothing is counted.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence

from compile_and_serve.runtime.ledger.waits import RequestClock
from compile_and_serve.runtime.messages import NOBODY, EngineStats, Tenant, TenantStats
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.shares import Account, Entry, Share, UserShare, served


class FairQueue:
    """accounts: of the keys with unfinished requests. may_start: whether a key may start one more request; set by `Fairness`.
    keeps_ledgers: requests have clocks of their waits.
    """

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.may_start: Callable[[Account], bool] = lambda account: account.has_room
        self.keeps_ledgers = True
        self._num_waiting = 0
        self._left: dict[UserShare, bool] = {}  # users with requests that ended; whether one of them waited

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no order."""
        return (entry[1] for account in self.accounts.values() for user in account.users.values() for entry in user.waiting)

    @property
    def is_contended(self) -> bool:
        """Whether several keys have unfinished requests."""
        return len(self.accounts) > 1

    @property
    def only_heap(self) -> list[Entry] | None:
        """The waiting requests where all are of one user; None otherwise."""
        if len(self.accounts) == 1:
            [account] = self.accounts.values()
            if len(account.users) == 1:
                [user] = account.users.values()
                return user.waiting
        return None

    def join(self, request: Request, tenant: Tenant | None) -> None:
        """A new request: it is unfinished until `leave`."""
        tenant = tenant or NOBODY
        account = self.accounts.get(tenant.name)
        if account is None:
            account = self.accounts[tenant.name] = Account(tenant)
        account.tenant = tenant
        request.share = account.user(tenant.user or "")
        account.num_unfinished += 1
        request.share.num_unfinished += 1
        if request.clock is not None:
            request.clock.move(account.clock, time.monotonic())
        elif self.keeps_ledgers:
            transport = max(0.0, time.time() - request.arrival_time - request.held_seconds)
            request.clock = RequestClock(account.clock, transport, time.monotonic(), held=request.held_seconds)

    def leave(self, request: Request) -> None:
        """The request has ended. It may still be in the queue, until `drop_finished`."""
        user = request.share
        account = user.account
        account.num_unfinished -= 1
        user.num_unfinished -= 1
        self._left[user] = self._left.get(user, False) or request.status is RequestStatus.WAITING

    def push(self, request: Request) -> None:
        """Let a request wait at its place in the order of its user's."""
        user = request.share
        account = user.account
        if not account.num_waiting and len(self.accounts) > 1:
            others = [other for other in self.accounts.values() if other is not account]
            _lift(account, others, [other for other in others if other.num_waiting])
        if not user.waiting and len(account.users) > 1:
            users = [other for other in account.users.values() if other is not user]
            _lift(user, users, [other for other in users if other.waiting])
        if request.num_preemptions and request.clock is not None:
            request.clock.preempt(account.clock, time.monotonic())
        heapq.heappush(user.waiting, (request.key, request))
        account.num_waiting += 1
        self._num_waiting += 1

    def push_back(self, request: Request) -> None:
        """Undo `pop`."""
        user = request.share
        heapq.heappush(user.waiting, (request.key, request))
        user.account.num_waiting += 1
        self._num_waiting += 1

    def end_step(self) -> None:
        """Every key may start requests again."""
        for account in self.accounts.values():
            account.is_skipped = False

    def first(self) -> Request | None:
        """The next request: of the least served key that waits and may start one, of its least served user."""
        best: Account | None = None
        for account in self.accounts.values():
            is_better = account.num_waiting and not account.is_skipped and (best is None or account.served < best.served)
            if is_better and self.may_start(account):
                best = account
        return None if best is None else best.first()

    def pop(self, request: Request) -> Request:
        """Take the request, which is `first` of its user."""
        user = request.share
        entry = heapq.heappop(user.waiting)
        assert entry[1] is request, request.request_id
        user.account.num_waiting -= 1
        self._num_waiting -= 1
        return request

    def take(self, account: Account, is_taken: Callable[[Request], bool]) -> list[Request]:
        """Take all waiting requests of a key for which `is_taken` holds."""
        taken: list[Request] = []
        for user in account.users.values():
            found = [entry for entry in user.waiting if is_taken(entry[1])]
            if found:
                taken += [entry[1] for entry in found]
                user.waiting = [entry for entry in user.waiting if not is_taken(entry[1])]
                heapq.heapify(user.waiting)
        account.num_waiting -= len(taken)
        self._num_waiting -= len(taken)
        return taken

    def first_ready(self) -> Request | None:
        """The next of the requests that could start if there were room."""
        accounts = self.accounts.values()
        for account in accounts if len(accounts) < 2 else sorted(accounts, key=served):
            for user in account.waiting_users():
                ready = min((entry for entry in user.waiting if can_start(entry[1])), default=None)
                if ready is not None:
                    return ready[1]
        return None

    def first_to_move(self) -> Request | None:
        """The request that could start next if there were room, if another scheduler could as well start it; None where it should stay."""
        first = self.first_ready() if self._num_waiting else None
        return None if first is None or first.num_preemptions or first.share.account.clock.reason == "prefix" else first

    def add_to(self, stats: EngineStats) -> None:
        """Say what requests wait for, and what each key has, unless all requests are of none."""
        if self._num_waiting and self.keeps_ledgers:
            for account in self.accounts.values():
                if account.num_waiting:
                    reason = account.clock.reason
                    stats.waiting_for[reason] = stats.waiting_for.get(reason, 0) + account.num_waiting
        if not self.accounts or (len(self.accounts) == 1 and NOBODY.name in self.accounts):
            return
        stats.tenants = {
            name: TenantStats(account.num_running, account.num_waiting, account.served) for name, account in self.accounts.items()
        }

    def drop_finished(self) -> None:
        """Drop the requests that ended while they waited, and the keys and users that have none left. Looks only at users of whom a
        request has ended.
        """
        left, self._left = self._left, {}
        finished = RequestStatus.FINISHED
        for user, has_waited in left.items():
            account = user.account
            if has_waited:
                kept = [entry for entry in user.waiting if entry[1].status is not finished]
                num_dropped = len(user.waiting) - len(kept)
                user.waiting = kept
                heapq.heapify(kept)
                account.num_waiting -= num_dropped
                self._num_waiting -= num_dropped
            if not user.num_unfinished and account.users.get(user.name) is user:
                del account.users[user.name]
            if not account.num_unfinished and self.accounts.get(account.tenant.name) is account:
                del self.accounts[account.tenant.name]


def can_start(request: Request) -> bool:
    """Whether nothing that the request waits for, besides room, is missing."""
    return request.is_ready and not request.num_pending_steps


def _lift(share: Share, others: Sequence[Share], waiting: Sequence[Share]) -> None:
    """Begin to wait at the counter of the least served that waits. Where nobody does, nobody was kept from having more."""
    level = min(other.served for other in waiting) if waiting else max(other.served for other in others)
    share.served = max(share.served, level)

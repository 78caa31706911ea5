"""What API keys and their users have had, and what waits for them: see fair_queue.py."""

from __future__ import annotations

from typing import Any

from compile_and_serve.runtime.ledger.waits import WaitClock
from compile_and_serve.runtime.messages import Tenant

Entry = tuple[tuple[float, ...], Any]  # a request behind its `Request.key`


class Share:
    """What one key or user has had. served: its virtual counter. num_unfinished: its requests that wait or run."""

    __slots__ = ("num_unfinished", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.num_unfinished = 0


class UserShare(Share):
    """A user's. waiting: a heap by `Request.key`."""

    __slots__ = ("account", "name", "waiting")

    def __init__(self, account: Account, name: str) -> None:
        super().__init__()
        self.account, self.name = account, name
        self.waiting: list[Entry] = []


class Account(Share):
    """A key's. users: those with unfinished requests. is_skipped: it starts no more requests in this step. clock: what its
    requests wait for. num_elsewhere: running requests in other data groups.
    """

    __slots__ = ("clock", "is_skipped", "num_elsewhere", "num_running", "num_waiting", "tenant", "users")

    def __init__(self, tenant: Tenant) -> None:
        super().__init__()
        self.tenant = tenant
        self.users: dict[str, UserShare] = {}
        self.num_running = self.num_waiting = self.num_elsewhere = 0
        self.is_skipped = False
        self.clock = WaitClock()

    @property
    def has_room(self) -> bool:
        """Whether the key's own limit lets it start one more request."""
        limit = self.tenant.max_running
        return limit is None or self.num_running + self.num_elsewhere < limit

    def user(self, name: str) -> UserShare:
        """The user's share, which is new unless the user has unfinished requests."""
        if (found := self.users.get(name)) is None:
            found = self.users[name] = UserShare(self, name)
        return found

    def waiting_users(self) -> list[UserShare]:
        """Users with waiting requests, the least served first."""
        users = [user for user in self.users.values() if user.waiting]
        return users if len(users) < 2 else sorted(users, key=served)

    def first(self) -> Any:
        """The next of its waiting requests; there must be one."""
        if len(self.users) == 1:
            [user] = self.users.values()
        else:
            user = min((user for user in self.users.values() if user.waiting), key=served)
        return user.waiting[0][1]


def served(share: Share) -> float:
    """Its virtual counter."""
    return share.served

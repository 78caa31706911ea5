"""`Places`: how many sequences of each API key are in flight, and whether there is room for more."""

from __future__ import annotations

from compile_and_serve.runtime.messages import NOBODY, Tenant
from compile_and_serve.runtime.scheduler.request_checks import check_places


class Places:
    """Counts the sequences of one API process."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._counts: dict[str, int] = {}

    def add(self, tenant: Tenant | None, count: int) -> None:
        """More sequences of a key are in flight."""
        tenant = tenant or NOBODY
        self._tenants[tenant.name] = tenant
        self._counts[tenant.name] = self._counts.get(tenant.name, 0) + count

    def remove(self, tenant: Tenant | None, count: int) -> None:
        """Sequences of a key have ended."""
        name = (tenant or NOBODY).name
        self._counts[name] -= count
        if not self._counts[name]:
            del self._counts[name], self._tenants[name]

    def check(self, tenant: Tenant | None, count: int, limit: int | None, max_running: int) -> None:
        """Raise as `check_places` does if there is no room for `count` more of a key."""
        tenant = tenant or NOBODY
        others = [(other, self._counts[name]) for name, other in self._tenants.items() if name != tenant.name]
        check_places(tenant, count, self._counts.get(tenant.name, 0), others, limit, max_running)

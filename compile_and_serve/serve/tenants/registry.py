"""`Tenants`: whose the keys of a server are."""

from __future__ import annotations

from compile_and_serve.runtime.messages import Tenant
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.tenant_options import TenantOptions, digest_of, tenants_of

ADMIN = TenantOptions(name="admin")
_WITHOUT_KEY = TenantOptions(name="default")


class Tenants:
    """The tenants of a server. all: those with a key of their own, and the admin.

    is_needed: whether requests are told apart at all. With a single key, and no entry for it, they are not: it costs nothing.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._by_digest = tenants_of(settings.tenants, settings.api_keys) | {digest_of(key): ADMIN for key in settings.admin_keys}
        self._by_user = settings.fair_by_user
        self.all = list({one.name: one for one in self._by_digest.values()}.values())
        self.is_needed = len(self.all) > 1 or bool(settings.tenants) or settings.fair_by_user
        self.has_rates = any(one.has_rates for one in self.all)

    def of(self, digest: str | None) -> TenantOptions | None:
        """The tenant of a request with a key of this digest. None: of a request without a key, on a server that has keys."""
        if digest is not None:
            return self._by_digest[digest]
        return None if self._by_digest else _WITHOUT_KEY

    def message(self, options: TenantOptions) -> Tenant:
        """What the engine must know of a tenant."""
        user = "" if self._by_user else None
        return Tenant(options.name, options.weight, options.max_running, options.max_waiting, user)

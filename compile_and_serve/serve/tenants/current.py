"""Whose the request is that a handler works on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import msgspec

from compile_and_serve.runtime.messages import Tenant

# Of the request whose handler runs. None: the server does not tell its requests apart. A user of "" stands for one that is not known yet.
current_tenant: ContextVar[Tenant | None] = ContextVar("current_tenant", default=None)


def tenant_name() -> str:
    """The name of the current tenant; "" where there is none."""
    tenant = current_tenant.get()
    return "" if tenant is None else tenant.name


def note_user(body: Any) -> None:
    """Take the user from a request's body, as an object or a model, where users of a key have shares of their own."""
    tenant = current_tenant.get()
    if tenant is None or tenant.user is None:
        return
    get = body.get if isinstance(body, Mapping) else lambda name: getattr(body, name, None)
    user, metadata = get("user"), get("metadata")
    if user is None and isinstance(metadata, Mapping):
        user = metadata.get("user_id")  # Anthropic's
    if isinstance(user, str) and user:
        hashed = hashlib.sha256(user.encode(errors="surrogatepass")).hexdigest()[:16]
        current_tenant.set(msgspec.structs.replace(tenant, user=hashed))

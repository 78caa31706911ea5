"""The `Host` of a request: exactly one, and one that is known where web pages could reach the server by a name of their own.

A page of another site may let its own name resolve to 127.0.0.1 (DNS rebinding). Then the browser takes a server on loopback for that site,
and lets the page read its answers. The request's `Host` has the site's name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence

from compile_and_serve.serve.errors import MAX_ECHO
from compile_and_serve.serve.settings import ServerSettings

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/?#@\\,:\[\]]*)(?::[0-9]*)?")


def known_hosts(settings: ServerSettings) -> Collection[str] | None:
    """The names under which a server may be called. None: it has API keys, which pages do not know, or is not on loopback alone."""
    if settings.api_keys or settings.uds is not None or not settings.is_local or "*" in settings.allowed_hosts:
        return None
    return {name.lower() for name in ("localhost", settings.host, *settings.allowed_hosts)}


def host_problem(hosts: Sequence[bytes], known: Collection[str] | None, *, is_required: bool) -> tuple[int, str] | None:
    """The status and sentence with which a request is refused; None if its `Host` is fine. hosts: the header's values."""
    if len(hosts) > 1 or (is_required and not hosts):
        return 400, f"A request must have one Host, and this one has {len(hosts)}."
    if not hosts:
        return None
    match = _HOST.fullmatch(hosts[0].decode("latin-1"))
    if match is None:
        return 400, f"Host is not the name of a host: {hosts[0]!r:.{MAX_ECHO}}."
    name = match[1].lower().rstrip(".")
    if known is None or name in known or name.endswith(".localhost") or _is_address(name):
        return None
    return 403, f"This server has no API keys, so it answers only to localhost, not to {name!r:.{MAX_ECHO}}: see --allowed-hosts."


def _is_address(name: str) -> bool:
    """Whether a name is an IP address, which no other site can have as its name."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True

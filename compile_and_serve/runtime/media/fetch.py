"""Downloads media from the hosts that the server's operator allows, and from no address inside of the operator's network.

Names are resolved once, and the connection goes to the address that was checked. Redirects are checked like the first URL.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from compile_and_serve.runtime.media.prepared import MediaError

FLAG = "--allowed-media-domains"
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """domains: that URLs may name; an address or "localhost" in it may be private. seconds: of the whole download."""

    domains: Sequence[str] = ()
    max_bytes: int = 64 << 20
    seconds: float = 15.0
    max_redirects: int = 3


def fetch(url: str, where: str, limits: FetchLimits) -> bytes:
    """The body that a URL has. Blocks the calling thread. Raises `MediaError`, which does not repeat the URL."""
    deadline = time.monotonic() + limits.seconds
    for _ in range(limits.max_redirects + 1):
        parts = _checked(url, where, limits)
        try:
            status, location, body = _get(parts, where, limits, deadline)
        except MediaError:
            raise
        except TimeoutError:
            raise MediaError(f"{where}: the download took more than {limits.seconds:g} seconds.") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MediaError(f"{where}: the download failed ({type(error).__name__}).") from None
        if status == 200:
            return body
        if status not in _REDIRECTS or not location:
            raise MediaError(f"{where}: the media's server answered with status {status}.")
        url = urljoin(url, location)
    raise MediaError(f"{where}: the URL redirects more than {limits.max_redirects} times.")


def _checked(url: str, where: str, limits: FetchLimits) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise MediaError(f"{where} is not a URL.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise MediaError(f"{where} must be a data: URL, or an http or https URL.")
    if parts.username is not None or parts.password is not None:
        raise MediaError(f"{where} must have no user name and no password in its URL.")
    if "*" not in limits.domains and host.rstrip(".").lower() not in {domain.lower() for domain in limits.domains}:
        raise MediaError(f"{where} names a host that this server does not download from: send the data, or start it with {FLAG} HOST.")
    return parts


def _address(host: str, port: int, where: str, limits: FetchLimits, deadline: float) -> tuple[int, str]:
    """The family and address to connect to."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise MediaError(f"{where}: the host of the URL has no address.") from None
    may_be_private = host.lower() in {domain.lower() for domain in limits.domains} and (host == "localhost" or _is_address(host))
    addresses = [(family, str(address[0])) for family, *_, address in found]
    if not may_be_private and not all(_is_public(address) for _, address in addresses):
        raise MediaError(f"{where}: the host of the URL has a private address, from which this server downloads nothing.")
    if time.monotonic() >= deadline:
        raise TimeoutError
    return addresses[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if mapped is None and isinstance(address, ipaddress.IPv6Address) and any(address in one for one in _HOLD_IPV4):
        mapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return (mapped or address).is_global and not (mapped or address).is_multicast


_HOLD_IPV4 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))  # NAT64, and addresses compatible with IPv4


def _get(parts: SplitResult, where: str, limits: FetchLimits, deadline: float) -> tuple[int, str | None, bytes]:
    """→ status, Location, body"""
    host = parts.hostname
    assert host is not None
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    _, address = _address(host, port, where, limits, deadline)
    connection = http.client.HTTPConnection(host, port)
    raw = socket.create_connection((address, port), timeout=_left(deadline))
    # A server that sends a byte now and then never lets a read time out.
    end = threading.Timer(_left(deadline), _shut, (connection,))
    try:
        connection.sock = raw
        if is_secure:
            connection.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
        end.start()
        if isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "compile-and-serve", "Accept": "image/*, video/*, audio/*"})
        response = connection.getresponse()
        if response.status != 200:
            return response.status, response.getheader("Location"), b""
        announced = response.getheader("Content-Length") or ""
        body = bytearray()
        is_large = announced.isdigit() and int(announced) > limits.max_bytes
        while not is_large and (chunk := response.read1(_CHUNK)):
            body += chunk
            is_large = len(body) > limits.max_bytes
        if is_large:
            raise MediaError(f"{where}: the media have more than {limits.max_bytes} bytes.")
        _left(deadline)  # of a body that was cut off
        if announced.isdigit() and len(body) < int(announced):
            raise MediaError(f"{where}: the media's server ended before the last byte.")
        return 200, None, bytes(body)
    except (OSError, http.client.HTTPException):
        _left(deadline)
        raise
    finally:
        end.cancel()
        if connection.sock is not None:
            connection.sock.close()
        connection.close()


def _left(deadline: float) -> float:
    """Seconds. Raises `TimeoutError` if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _shut(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)

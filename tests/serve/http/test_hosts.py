"""Requests that are refused before they are routed: dot segments, no `Host` or several, unknown hosts; and answers that arrive."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest

from compile_and_serve.serve.http.hosts import host_problem, known_hosts
from compile_and_serve.serve.settings import ServerSettings
from tests.support.fake_server import FakeServer

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(max_body_bytes=LIMIT, connection_limits={"body_seconds": 3.0}) as server:
        yield server


@pytest.fixture(scope="module")
def keyed() -> Iterator[FakeServer]:
    with FakeServer(api_keys=["secret"]) as server:
        yield server


def ask(server: FakeServer, head: str, *hosts: str, version: str = "1.1", rest: bytes = b"") -> tuple[int, dict[str, object]]:
    """(status, body) of a raw request."""
    lines = [f"{head} HTTP/{version}", *(f"Host: {host}" for host in hosts), "Connection: close"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + rest)
        received = b""
        while part := connection.recv(65536):
            received += part
    head_received, _, body = received.partition(b"\r\n\r\n")
    return int(head_received.split()[1]), json.loads(body) if body.startswith(b"{") else {}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/../../metrics", "/v1/responses/%2e%2e/%2E./metrics", "/..", "/.", "/./health", "/a/..?x=1", "/v1/..%2fmetrics",
        "/v1/x/%2e%2e%2f%2e%2e%2fhealth", "http://localhost/v1/../health", "/v1/load_lora_adapter/../models", "/docs/../metrics#..",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_dot_segments_are_refused(server: FakeServer, keyed: FakeServer, method: str, path: str) -> None:
    for one in (server, keyed):
        status, body = ask(one, f"{method} {path}", "localhost")
        assert (status, "segment . or .." in str(body)) == (400, True)


@pytest.mark.parametrize(
    "path", ["/health?a=/../b", "/health?..", "/v1/models/a..b", "/v1/models/...", "/v1/models/.hidden", "/%252e%252e/health"]
)
def test_dots_elsewhere_are_fine(server: FakeServer, path: str) -> None:
    status, _ = ask(server, f"GET {path}", "localhost")
    assert status == (200 if path.startswith("/health") else 404)


@pytest.mark.parametrize(
    "hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example"), ("a b",), ("a/b",), ("a@b",), ("a:b",), ("[::1",)]
)
def test_a_request_has_one_host(server: FakeServer, keyed: FakeServer, hosts: tuple[str, ...]) -> None:
    for one in (server, keyed):
        status, body = ask(one, "GET /health", *hosts)
        assert (status, "ost" in str(body)) == (400, True)


def test_http_1_0_needs_no_host(server: FakeServer) -> None:
    assert ask(server, "GET /health", version="1.0")[0] == 200
    assert ask(server, "GET /health", "evil.example", version="1.0")[0] == 403


@pytest.mark.parametrize(
    "head", ["GET /health", "GET /v1/models", "POST /v1/chat/completions", "GET /metrics", "OPTIONS /", "GET /docs", "GET /nothing"]
)
def test_unknown_hosts_are_refused_on_loopback_without_keys(server: FakeServer, keyed: FakeServer, head: str) -> None:
    """A page of evil.example whose name resolves to 127.0.0.1 sends its own name."""
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost", ""):
        status, body = ask(server, head, host)
        assert (status, "--allowed-hosts" in str(body)) == (403, True), host
        assert ask(keyed, head, host)[0] != 403
    for host in ("localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "localhost."):
        assert ask(server, head, host)[0] != 403, host


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, b"evil.example", 403),
        ({"host": "127.0.0.2"}, b"evil.example", 403),
        ({"host": "::1"}, b"evil.example", 403),
        ({"host": "localhost"}, b"evil.example", 403),
        ({"allowed_hosts": ("Proxy.example",)}, b"proxy.example:443", None),
        ({"allowed_hosts": ("proxy.example",)}, b"evil.example", 403),
        ({"allowed_hosts": ("*",)}, b"evil.example", None),
        ({"host": "0.0.0.0"}, b"evil.example", None),
        ({"api_keys": ("a",)}, b"evil.example", None),
        ({"admin_keys": ("a",)}, b"evil.example", 403),  # the API itself is open
        ({"admin_keys": ("a",)}, b"192.168.1.5:8000", None),  # no site has an address as its name
    ],
)
def test_where_only_known_hosts_are_served(settings: dict[str, object], host: bytes, status: int | None) -> None:
    known = known_hosts(ServerSettings(served_model_names=("m",), **settings))  # type: ignore[arg-type]
    problem = host_problem([host], known, is_required=True)
    assert (problem and problem[0]) == status


@pytest.mark.parametrize("how", ["length", "chunked", "length, closing", "chunked, closing"])
def test_a_body_that_is_too_large_gets_its_answer(server: FakeServer, how: str) -> None:
    """The client sends all of it before it reads: a server that closed earlier would reset the connection, and the answer would be lost."""
    size = 16 * LIMIT
    headers = {"Content-Type": "application/json"} | ({"Connection": "close"} if "closing" in how else {})
    for path in ("/v1/completions", "/v1/responses", "/tokenize"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        content = b" " * (1 << 16)
        if how.startswith("chunked"):
            connection.request("POST", path, iter([content] * (size // len(content))), headers, encode_chunked=True)
        else:
            connection.request("POST", path, content * (size // len(content)), headers)
        response = connection.getresponse()
        assert (response.status, b"--max-body-size" in response.read()) == (413, True)
        connection.close()


@pytest.mark.slow
def test_a_body_without_an_end_is_not_read_for_ever(server: FakeServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (1 << 60)
    for pause in (0.0, 0.05):  # as much as possible, or slowly
        began, sent = time.monotonic(), 0
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head)
            try:
                while True:
                    sent += connection.send(b" " * (1 << 16 if not pause else 1))
                    time.sleep(pause)
                    assert time.monotonic() - began < 20
            except OSError:
                pass  # the server has closed
        assert sent < 200 << 20

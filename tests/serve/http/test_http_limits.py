"""Slow, endless or odd clients: one connection occupies little, and the server stays open to others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.fake_server import TEXT, FakeServer

BODY = b'{"prompt": "Hi", "max_tokens": 100}'
HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"Content-Length: %d\r\n" % len(BODY)
LIMITS = {"header_seconds": 0.5, "body_seconds": 0.5, "write_seconds": 0.5, "idle_seconds": 2}


class Connection:
    """A socket with a server, and what was received from it."""

    def __init__(self, server: FakeServer, *data: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        self.received = b""
        for part in data:
            self.send(part)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> bool:
        """Receive once; false if the server has closed the connection."""
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            return False
        self.received += data
        return bool(data)

    def response(self) -> tuple[int, bytes]:
        """(status, body) of the next response, which must have a content-length."""
        while b"\r\n\r\n" not in self.received:
            assert self.receive(), self.received
        head, _, rest = self.received.partition(b"\r\n\r\n")
        [length] = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        while len(rest) < length:
            assert self.receive(), rest
            rest = self.received.partition(b"\r\n\r\n")[2]
        self.received = rest[length:]
        return int(head.split()[1]), rest[:length]

    def json(self) -> tuple[int, Any]:
        status, body = self.response()
        return status, json.loads(body)

    def seconds_until_closed(self) -> float:
        started = time.monotonic()
        while self.receive():
            continue
        return time.monotonic() - started


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(connection_limits=LIMITS) as server:
        yield server


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "websocket, closing": b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n",
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", UPGRADES)
def test_upgrade_is_ignored(server: FakeServer, name: str, parts: int) -> None:
    """The request keeps its body, and the connection remains usable."""
    request = POST + UPGRADES[name] + b"\r\n" + BODY
    with Connection(server) as connection:
        for _ in range(1 if "closing" in name else 3):
            for i in range(parts):  # the last part is the body
                cut = [0, 70, len(request) - len(BODY), len(request)] if parts == 3 else [0, len(request)]
                connection.send(request[cut[i] : cut[i + 1]])
                time.sleep(0.02 * (parts - 1))
            status, answer = connection.json()
            assert (status, answer["choices"][0]["text"]) == (200, TEXT)
        if "closing" in name:
            assert connection.seconds_until_closed() < 1
        else:
            connection.send(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.json() == (200, {"status": "ready"})


def test_pipelined_upgrades_are_answered_in_order(server: FakeServer) -> None:
    request = b"GET /ready?%d HTTP/1.1\r\nHost: localhost\r\n" + UPGRADES["h2c"] + b"\r\n"
    with Connection(server, b"".join(request % i for i in range(5)) + POST + b"\r\n" + BODY) as connection:
        for _ in range(5):
            assert connection.json() == (200, {"status": "ready"})
        assert connection.json()[1]["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    "request_bytes",
    [b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\0\0\r\n"],
)
def test_what_is_not_an_http_request_is_a_400(server: FakeServer, request_bytes: bytes) -> None:
    with Connection(server, request_bytes) as connection:
        status, answer = connection.json()
        assert (status, answer["error"]["code"]) == (400, 400)
        assert connection.seconds_until_closed() < 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET /ready HTTP/1.1\r\n" + b"a:b\r\n" * 100_000,
        b"GET /ready HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(129)) + b"\r\n",
        b"GET /ready HTTP/1.1\r\nx: " + b"y" * 10_000_000,
        b"GET /" + b"y" * 10_000_000,
        POST.replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked")
        + b"\r\n%x\r\n" % len(BODY)
        + BODY
        + b"\r\n0\r\n"
        + b"a: b\r\n" * 100_000,
    ],
    ids=["many", "129", "long", "url", "trailers"],
)
def test_headers_are_bounded(server: FakeServer, head: bytes) -> None:
    server.start_measuring()
    with Connection(server) as connection:
        try:
            connection.send(head)
            connection.socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError, OSError):
            pass  # refused before it was all sent
        connection.seconds_until_closed()
        assert connection.received.startswith(b"HTTP/1.1 431 ")
    lag, memory = server.measured()
    assert memory < 20
    assert lag < 0.25


def test_128_headers_are_accepted(server: FakeServer) -> None:
    head = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(127)) + b"\r\n"
    with Connection(server, head, head) as connection:
        assert [connection.json() for _ in range(2)] == [(200, {"status": "ready"})] * 2


@pytest.mark.parametrize("start", [b"", b"GET /ready HTTP/1.1\r\nx: ", b"\r\n"])
@pytest.mark.parametrize("second", [False, True])
def test_headers_have_a_deadline(server: FakeServer, start: bytes, second: bool) -> None:
    """Also if the client sends a byte from time to time, and for a later request of the connection."""
    with Connection(server) as connection:
        if second:
            connection.send(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.response()
        connection.socket.settimeout(0.1)
        connection.send(start)
        started, is_open = time.monotonic(), True
        while is_open and time.monotonic() - started < 20:
            try:
                is_open = connection.receive()
                if is_open:
                    continue
            except TimeoutError:
                if start:
                    connection.send(start[-1:])
        assert not is_open
        assert time.monotonic() - started < (5 if start else 6)
        assert connection.received.startswith(b"HTTP/1.1 408 " if start.startswith(b"GET") else b"")


def test_body_has_a_deadline(server: FakeServer) -> None:
    with Connection(server, POST + b"\r\n" + BODY[:5]) as connection:
        status, answer = connection.json()
        assert (status, answer["error"]["message"]) == (408, "The body did not arrive within 0.5 seconds.")
        assert connection.seconds_until_closed() < 1
    with Connection(server, POST + b"Expect: 100-continue\r\n\r\n") as connection:
        connection.seconds_until_closed()
        assert connection.received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408 ")


def test_idle_connection_is_closed(server: FakeServer) -> None:
    with Connection(server, b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        assert connection.response()[0] == 200
        assert 1 < connection.seconds_until_closed() < 10


def test_unread_response_is_dropped(server: FakeServer) -> None:
    """A client that does not read, while its response exceeds the socket's buffers."""
    text = json.dumps({"prompt": "a b " * 100_000, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\n" + HEADERS + b"Content-Length: %d\r\n\r\n" % len(text)
    with Connection(server) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        for _ in range(3):
            connection.send(head + text)
        connection.socket.recv(1, socket.MSG_PEEK)  # the first response is computed and being written
        time.sleep(3)
        assert httpx.get(server.url + "/ready").status_code == 200
        connection.seconds_until_closed()
    assert 0 < len(connection.received) < 9_000_000  # of 9.6 MB


def test_pipelined_requests_are_bounded(server: FakeServer) -> None:
    request = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Connection(server, request * 16) as connection:
        assert [connection.json() for _ in range(16)] == [(200, {"status": "ready"})] * 16
    with Connection(server, request * 5000) as connection:
        connection.seconds_until_closed()
        assert connection.received.count(b'{"status":"ready"}') < 100


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["no body"])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nx: ", POST + b"\r\n"], ids=["nothing", "headers", "no body"])
def test_idle_connections_do_not_shut_out_others(sent: bytes) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(FakeServer(before="ulimit -n 256"))
        idle = [stack.enter_context(Connection(server, sent)) for _ in range(400)]
        for _ in range(20):
            assert httpx.get(server.url + "/health", timeout=5).status_code == 200
        with Connection(server, POST + b"\r\n" + BODY) as connection:
            assert connection.json()[1]["choices"][0]["text"] == TEXT
        idle[0].socket.settimeout(1)
        assert not idle[0].receive()  # the longest waiting was closed
        idle[-1].socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            idle[-1].receive()


@pytest.mark.slow
def test_busy_connections_are_kept_and_new_ones_get_a_503() -> None:
    limits = {"connections": 3}
    body = b'{"prompt": "Hi", "max_tokens": 40, "ignore_eos": true}'
    request = b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ExitStack() as stack:
        server = stack.enter_context(FakeServer(connection_limits=limits, pause=0.05))
        busy = [stack.enter_context(Connection(server, request)) for _ in range(3)]
        time.sleep(0.5)
        with Connection(server) as refused:
            status, answer = refused.json()
            assert (status, answer["error"]["code"]) == (503, 503)
        for connection in busy:
            assert connection.response()[0] == 200
        assert httpx.get(server.url + "/ready").status_code == 200

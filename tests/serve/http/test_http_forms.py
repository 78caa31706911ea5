"""What probes, proxies and old clients send: HTTP/1.0, HEAD, OPTIONS, absolute request targets, Expect."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.serve.conftest import Server, StartServer
from tests.support.fake_server import TEXT, FakeServer

SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
STREAMS = {
    "/v1/chat/completions": SHORT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/messages": SHORT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 100},
    "/invocations": SHORT,
}


@pytest.fixture(scope="module")
def server_process() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def exchange(server: FakeServer, data: bytes) -> tuple[bytes, bytes]:
    """(head, body) of what the server sends until it closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        while part := connection.recv(65536):
            received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return head.lower(), body


def http10(path: str, body: dict[str, object], *headers: bytes) -> bytes:
    content = json.dumps(body).encode()
    lines = [b"POST %b HTTP/1.0" % path.encode(), b"Content-Type: application/json", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


@pytest.mark.parametrize("headers", [(), (b"Connection: keep-alive",), (b"Expect: 100-continue",)])
@pytest.mark.parametrize("path", STREAMS)
def test_stream_over_http_1_0_ends_with_the_connection(server_process: FakeServer, path: str, headers: tuple[bytes, ...]) -> None:
    head, body = exchange(server_process, http10(path, {**STREAMS[path], "stream": True}, *headers))
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    lines = [line for line in body.split(b"\n") if line]
    assert all(line.startswith((b"data: ", b"event: ")) for line in lines)
    assert body.endswith(b"\n\n")
    answers = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert len(answers) > 3


def test_answer_over_http_1_0_has_its_length(server_process: FakeServer) -> None:
    head, body = exchange(server_process, http10("/v1/completions", STREAMS["/v1/completions"]))
    assert b"content-length: %d" % len(body) in head
    assert b"transfer-encoding" not in head
    assert json.loads(body)["choices"][0]["text"] == TEXT
    head, body = exchange(server_process, http10("/v1/completions", {"prompt": []}))
    assert b" 400 " in head
    assert b"content-length: %d" % len(body) in head


def test_stream_over_http_1_1_stays_chunked(server_process: FakeServer) -> None:
    request = http10("/v1/completions", {**STREAMS["/v1/completions"], "stream": True}, b"Connection: close", b"Host: localhost")
    head, body = exchange(server_process, request.replace(b"HTTP/1.0", b"HTTP/1.1"))
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "target", [b"/health", b"http://example.com/health", b"HTTPS://example.com:8443/health", b"http://user@[::1]:80/health?probe=1"]
)
def test_target_may_be_an_absolute_url(server_process: FakeServer, target: bytes) -> None:
    head, body = exchange(server_process, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (head.split(b" ")[1], json.loads(body)) == (b"200", {"status": "ok"})


@pytest.mark.parametrize("target", [b"http://example.com", b"http://example.com?x=1", b"/", b"/?x=1"])
def test_target_without_a_path_is_the_first_page(server_process: FakeServer, target: bytes) -> None:
    head, body = exchange(server_process, b"GET " + target + b" HTTP/1.0\r\n\r\n")
    assert head.split(b" ")[1] == b"200"
    assert b"<html" in body


def test_absolute_target_does_not_open_a_path() -> None:
    """The key is asked for by the path that is routed."""
    with FakeServer(api_keys=["secret"]) as server:
        for target in (b"http://x/v1/models", b"http://health/v1/models", b"http://x/v1/models?/health"):
            head, _ = exchange(server, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert head.split(b" ")[1] == b"401"


def test_options_of_the_server(server_process: FakeServer) -> None:
    for target in (b"*", b"/", b"/health"):
        head, body = exchange(server_process, b"OPTIONS " + target + b" HTTP/1.0\r\n\r\n")
        assert (head.split(b" ")[1], body) == (b"204", b"")
        assert b"allow: get, head, options" in head
    assert exchange(server_process, b"GET * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0].split(b" ")[1] in (b"200", b"400")


def test_head_over_http(server_process: FakeServer) -> None:
    for version in (b"1.0", b"1.1"):
        head, body = exchange(server_process, b"HEAD /health HTTP/%b\r\nHost: localhost\r\nConnection: close\r\n\r\n" % version)
        assert (head.split(b" ")[1], body) == (b"200", b"")
        assert b"content-length: 15" in head


def test_expect_gets_its_answer_before_the_body(server_process: FakeServer) -> None:
    content = json.dumps(STREAMS["/v1/completions"]).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += b"Expect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", server_process.port), timeout=20) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(content)
        received = b""
        while part := connection.recv(65536):
            received += part
    assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == TEXT
    # A body that is too large is refused without being sent.
    received, _ = exchange(server_process, head + b"Content-Length: 999999999\r\n\r\n")
    assert received.split(b" ")[1] == b"413"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/ready", "/ping", "/version", "/load", "/metrics", "/v1/models", "/openapi.json", "/docs"]
)
async def test_head_has_the_headers_of_get(server: Server, path: str) -> None:
    head, get = await server.http.head(path), await server.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type" if path != "/ping" else "x-request-id"]
    if path != "/metrics":  # its size changes
        assert head.headers.get("content-length") == get.headers.get("content-length")


@pytest.mark.slow
async def test_head_and_options_keep_errors(start_server: StartServer) -> None:
    server = await start_server(api_keys=("secret",))
    assert (await server.http.head("/v1/models")).status_code == 401
    assert (await server.http.head("/health")).status_code == 200
    key = {"Authorization": "Bearer secret"}
    assert (await server.http.head("/nowhere", headers=key)).status_code == 404
    assert (await server.http.options("/nowhere", headers=key)).status_code == 404
    assert (await server.http.head("/v1/chat/completions", headers=key)).status_code == 405
    options = await server.http.options("/v1/chat/completions")
    assert (options.status_code, options.headers["allow"], options.content) == (204, "OPTIONS, POST", b"")
    assert "content-length" not in options.headers
    assert "access-control-allow-origin" not in options.headers

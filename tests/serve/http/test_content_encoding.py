"""Compressed request bodies: every coding, on every API, within the limits before and after decoding."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from tests.serve.conftest import Server, StartServer

SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
BODIES = {
    "/v1/chat/completions": SHORT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/messages": SHORT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 100},
    "/tokenize": {"prompt": "Hi"},
    "/invocations": SHORT,
}


def _raw_deflate(content: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(content) + encoder.flush()


def _members(encode: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Two gzip members or zstd frames after each other, which are one content."""
    return lambda content: encode(content[:9]) + encode(content[9:])


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip of two members": ("gzip", _members(gzip.compress)),
    "old name of gzip": ("X-Gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without zlib's header": ("deflate", _raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "zstd of two frames": ("zstd", _members(zstandard.compress)),
    "zstd after nothing": ("identity, ZSTD", zstandard.compress),
    "br": ("br", brotli.compress),
    "identity": ("identity", bytes),
}


def _headers(coding: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Content-Encoding": coding}


@pytest.mark.parametrize("name", ENCODERS)
async def test_compressed_body_is_answered_like_a_plain_one(server: Server, name: str) -> None:
    coding, encode = ENCODERS[name]
    for path, body in BODIES.items():
        content = json.dumps(body).encode()
        compressed = await server.http.post(path, content=encode(content), headers=_headers(coding))
        plain = await server.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert (compressed.status_code, plain.status_code) == (200, 200), (path, compressed.text)
        assert compressed.json().get("usage") == plain.json().get("usage")
        assert compressed.json().get("tokens") == plain.json().get("tokens")


@pytest.mark.parametrize("name", ENCODERS)
async def test_long_bodies_keep_every_byte(server: Server, name: str) -> None:
    coding, encode = ENCODERS[name]
    text = "the quick brown fox 🙂 " * 9000
    answer = await server.http.post("/tokenize", content=encode(json.dumps({"prompt": text}).encode()), headers=_headers(coding))
    assert server.tokenizer.decode(answer.json()["tokens"]) == text


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "identity"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_bomb_is_a_413(start_server: StartServer, name: str, path: str) -> None:
    server = await start_server(max_body_bytes=100_000)
    coding, encode = ENCODERS[name]
    bomb = encode(b"[" + b" " * 10_000_000)
    assert len(bomb) < 100_000
    answer = await server.http.post(path, content=bomb, headers=_headers(coding))
    assert (answer.status_code, "--max-body-size" in answer.text) == (413, True)
    exact = b'{"prompt": "Hi"}'.ljust(100_000)
    for content, status in ((exact, 200), (exact + b" ", 413)):
        assert (await server.http.post("/tokenize", content=encode(content), headers=_headers(coding))).status_code == status


async def test_compressed_size_is_limited_too(start_server: StartServer) -> None:
    server = await start_server(max_body_bytes=1000)
    stored = zlib.compressobj(0, wbits=31)
    content = stored.compress(b" " * 1001) + stored.flush()
    assert (await server.http.post("/tokenize", content=content, headers=_headers("gzip"))).status_code == 413
    empty_members = gzip.compress(b"") * 2000
    server = await start_server()
    answer = await server.http.post("/tokenize", content=empty_members, headers=_headers("gzip"))
    assert (answer.status_code, "not valid gzip" in answer.text) == (400, True)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "identity"])
async def test_damaged_body_is_a_400(server: Server, name: str) -> None:
    coding, encode = ENCODERS[name]
    content = encode(b'{"prompt": "Hi"}')
    for damaged in (b"plain text", content[:-4], content[:1], content + b"more", b'{"prompt": "Hi"}'):
        answer = await server.http.post("/tokenize", content=damaged, headers=_headers(coding))
        assert (answer.status_code, "error" in answer.json()) == (400, True), damaged


@pytest.mark.parametrize("coding", ["lzma", "gzip, gzip", "br, zstd", "utf-8", "compress", "gzip;q=1"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_other_codings_are_a_415(server: Server, coding: str, path: str) -> None:
    answer = await server.http.post(path, content=gzip.compress(b"{}"), headers=_headers(coding))
    assert (answer.status_code, "Content-Encoding" in answer.text) == (415, True)
    assert answer.headers["Accept-Encoding"] == "gzip, deflate, zstd, br"
    assert ("type" in answer.json()) == (path == "/v1/messages")


async def test_header_without_a_body(server: Server) -> None:
    assert (await server.http.get("/health", headers={"Content-Encoding": "lzma"})).status_code == 200
    assert (await server.http.post("/tokenize", headers=_headers("gzip"))).status_code == 400

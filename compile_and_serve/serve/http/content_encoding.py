"""ASGI middleware that decodes compressed request bodies: gzip, deflate, zstd and br."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator

import brotli
import zstandard
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.serve.errors import MAX_ECHO, error_response, path_of
from compile_and_serve.serve.http.middleware import body_too_large

_PART = 64 * 1024  # bytes decoded at a time
_MAX_MEMBERS = 1024  # of a gzip body
_MAX_WINDOW = 8 << 20  # bytes that a zstd frame may refer back; RFC 9659 limits it so for HTTP
_ZLIB, _GZIP, _RAW = 15, 31, -15  # `wbits` of zlib


class _DamagedError(ValueError):
    """The content is cut off, or continues after its end."""


def _gzip(content: bytes) -> Iterator[bytes]:
    for _ in range(_MAX_MEMBERS):
        decoder = zlib.decompressobj(_GZIP)
        yield from _inflate(decoder, content)
        content = decoder.unused_data
        if not content:
            return
    raise _DamagedError


def _deflate(content: bytes) -> Iterator[bytes]:
    # RFC 9110 means zlib's format, but some clients send the bare stream. zlib's two bytes of header tell them apart.
    has_header = content[0] & 0x0F == 8 and int.from_bytes(content[:2], "big") % 31 == 0
    decoder = zlib.decompressobj(_ZLIB if has_header else _RAW)
    yield from _inflate(decoder, content)
    if decoder.unused_data:
        raise _DamagedError


def _inflate(decoder: zlib._Decompress, content: bytes) -> Iterator[bytes]:
    while not decoder.eof:
        part = decoder.decompress(content, _PART)
        content = decoder.unconsumed_tail
        if not part and not content and not decoder.eof:
            raise _DamagedError
        yield part


def _zstd(content: bytes) -> Iterator[bytes]:
    with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(content, read_across_frames=True) as reader:
        while part := reader.read(_PART):
            yield part


def _brotli(content: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    while not decoder.is_finished():
        part = decoder.process(content, output_buffer_limit=_PART)
        if not part and not decoder.is_finished():
            raise _DamagedError
        content = b""
        yield part


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,  # its old name, as RFC 9110 says
    "deflate": _deflate,
    "zstd": _zstd,
    "br": _brotli,
}
_NAMES = "gzip, deflate, zstd, br"


def decode(coding: str, content: bytes, max_bytes: int) -> bytes:
    """The decoded content. Raises a 413 as soon as it has more than `max_bytes`, and a 400 if it is damaged."""
    parts: list[bytes] = []
    num_bytes = 0
    try:
        for part in _DECODERS[coding](content):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise body_too_large(max_bytes)
        if not num_bytes:
            raise _DamagedError
    except (zlib.error, zstandard.ZstdError, brotli.error, _DamagedError):
        raise HTTPException(400, f"The body is not valid {coding}, which the header Content-Encoding announces.") from None
    return b"".join(parts)


class ContentEncodingMiddleware:
    """Decodes the bodies of POST requests. Both the received and the decoded body may have `max_bytes`.

    It lies inside of `BodyLimitMiddleware`, which counts what is received. Unknown and stacked codings are a 415.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        codings = _codings(scope) if scope["type"] == "http" and scope["method"] == "POST" else []
        if not codings:
            await self.app(scope, receive, send)
            return
        if len(codings) > 1 or codings[0] not in _DECODERS:
            given = ", ".join(codings)
            message = f"The header Content-Encoding must be one of {_NAMES}, got '{given:.{MAX_ECHO}}'."
            await error_response(415, message, headers={"Accept-Encoding": _NAMES}, path=path_of(scope))(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"content-encoding", b"content-length")]
        body = _DecodedBody(receive, codings[0], self._max_bytes)
        await self.app({**scope, "headers": headers}, body.receive, send)


def _codings(scope: Scope) -> list[str]:
    given = ",".join(Headers(scope=scope).getlist("content-encoding")).lower()
    return [coding for one in given.split(",") if (coding := one.strip()) not in ("", "identity")]


class _DecodedBody:
    """The body of one request, received and decoded when it is first asked for."""

    def __init__(self, receive: Receive, coding: str, max_bytes: int) -> None:
        self._receive, self._coding, self._max_bytes = receive, coding, max_bytes
        self._content: memoryview | None = None

    async def receive(self) -> Message:
        """The next message: parts of the decoded body, then what follows the body."""
        if self._content is None:
            received = bytearray()
            while True:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                received += message.get("body", b"")
                if not message.get("more_body", False):
                    break
            # In a thread, because the time depends on the decoded size.
            decoded = await asyncio.to_thread(decode, self._coding, bytes(received), self._max_bytes) if received else b""
            self._content = memoryview(decoded)
        elif not self._content:
            return await self._receive()
        part, self._content = bytes(self._content[:_PART]), self._content[_PART:]
        await asyncio.sleep(0)  # the reader measures each part, and streams continue between
        return {"type": "http.request", "body": part, "more_body": bool(self._content)}

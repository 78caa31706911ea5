"""uvicorn's HTTP protocol with limits on what one client can occupy: time, header bytes and connections.

It also ignores requests to upgrade the connection (WebSocket, HTTP/2), as HTTP allows, and answers them over HTTP/1.1. HTTP/1.0 gets no
chunked coding, and request targets may be absolute URLs, as proxies send them, or `*`. Paths with dot segments are refused before anything
else reads them, and so are requests without one `Host`, or for a host that is not known where only known ones are served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import sys
import urllib.parse
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import httptools
import msgspec
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from compile_and_serve.serve.errors import error_body
from compile_and_serve.serve.http.hosts import host_problem
from compile_and_serve.serve.settings import ConnectionLimits

logger = logging.getLogger(__name__)

_RESERVED_FILES = 64  # file descriptors that connections leave to the rest of the process
_MAX_CONNECTIONS = 8192
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
_ABSOLUTE_URL = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
_DISCARDED_BYTES = 64 << 20  # of requests whose response is sent already
_STARTS_PER_TURN = 8
_PROBES = frozenset({"/health", "/ready", "/ping"})
_DISCARDING_SECONDS = 2.0  # after a request was refused that cannot be read to its end
_REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def available_connections() -> int:
    """Number of connections for which the process has file descriptors left."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        num_open = _RESERVED_FILES
    return max(16, min(_MAX_CONNECTIONS, limit - num_open - _RESERVED_FILES))


def limited_protocol(limits: ConnectionLimits, known_hosts: Collection[str] | None = None) -> type[HttpToolsProtocol]:
    """The protocol class of one server. known_hosts: names that `Host` may have; None: all."""
    connections = available_connections() if limits.connections is None else limits.connections
    attributes = {"limits": limits, "max_connections": connections, "known_hosts": known_hosts, "waiting": {}, "starts": _Starts()}
    return type("LimitedProtocol", (_LimitedProtocol,), attributes)


def _path_and_query(target: bytes) -> bytes:
    """Of a request's target, which is an absolute URL if the client takes the server for a proxy, and `*` if it means no resource."""
    path = _ABSOLUTE_URL.sub(b"", target, count=1) if not target.startswith(b"/") else target
    return path if path.startswith(b"/") else b"/" + path.removeprefix(b"*")


def _has_dot_segments(target: bytes) -> bool:
    """Whether a path, decoded as the router decodes it, has a segment . or .., which others who read it would resolve."""
    path = urllib.parse.unquote_to_bytes(target.partition(b"?")[0].partition(b"#")[0])
    return any(segment in (b".", b"..") for segment in path.split(b"/"))


class _ResponseTransport:
    """What responses are written to. `close` waits until the request's body has been received, or the client might not see the response:
    closing a socket that holds unread data resets the connection.
    """

    __slots__ = ("close", "get_extra_info", "is_closing", "write")

    def __init__(self, protocol: _LimitedProtocol) -> None:
        transport = protocol.transport
        self.write, self.is_closing, self.get_extra_info = transport.write, transport.is_closing, transport.get_extra_info
        self.close = protocol.close_after_body


class _Starts:
    """Starts up to `_STARTS_PER_TURN` requests in a turn of the event loop. Each takes about a millisecond: a thousand that arrive at once
    must not keep the loop from everything else for a second.
    """

    def __init__(self) -> None:
        self._num_started = 0  # in this turn
        self._waiting: deque[Callable[[], None]] = deque()

    def start(self, loop: asyncio.AbstractEventLoop, start: Callable[[], None], *, at_once: bool) -> None:
        """at_once: of a probe, which takes no time."""
        if not at_once and (self._waiting or self._num_started >= _STARTS_PER_TURN):
            self._waiting.append(start)
            return
        if not self._num_started:
            loop.call_soon(self._begin_turn, loop)
        self._num_started += 1
        start()

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_started = min(len(self._waiting), _STARTS_PER_TURN)
        if self._num_started:
            loop.call_soon(self._begin_turn, loop)
        for _ in range(self._num_started):
            self._waiting.popleft()()


class _Http10Cycle(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunked coding: without a content-length, it ends with the connection."""

    _has_length = True

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", []))
            if not self._has_length:
                self.chunked_encoding, self.expected_content_length = False, sys.maxsize
        elif message["type"] == "http.response.body" and not self._has_length and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _RefusedError(Exception):
    """Raised in a callback of the parser to stop parsing."""


class _LimitedProtocol(HttpToolsProtocol):
    """One connection. The class attributes belong to one server.

    waiting: connections from which the server waits for a request or the rest of one, the longest waiting first.
    """

    limits: ConnectionLimits
    max_connections: int
    known_hosts: Collection[str] | None
    starts: _Starts
    waiting: dict[_LimitedProtocol, None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._refusal: tuple[int, str] | None = None
        self._has_begun = False  # a request whose end has not been received
        self._has_headers = False  # its headers are complete
        self._is_upgrade = False
        self._has_body = False
        self._num_headers = 0
        self._parsed_bytes = 0  # of the request line and the headers
        self._later_bytes = 0  # received for incomplete headers, without the data in which they began
        self._is_ending = False  # the last response is sent, and the rest of its request is discarded
        self._is_discarding = False  # and so is everything, because nobody knows where the request ends
        self._discarded_bytes = 0

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._response_transport: Any = _ResponseTransport(self)
        if len(self.connections) > self.max_connections and not self._close_longest_waiting():
            self._refuse(503, "The server has too many connections: try again later.")
            return
        self.waiting[self] = None
        self._start_timer("headers", self.limits.header_seconds, self._on_slow_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.pop(self, None)
        for timer in self._timers.values():
            timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer("write", self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("write")

    def _close_longest_waiting(self) -> bool:
        longest = next(iter(self.waiting), None)
        if longest is None:
            return False
        del self.waiting[longest]
        self.connections.discard(longest)
        longest.transport.abort()
        return True

    # Requests

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_discarding:
            self._discard(data)
            return
        self._unset_keepalive_if_required()
        if self._has_begun and not self._has_headers:
            self._later_bytes += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (400, "The request is not valid HTTP.")))
            return
        if self._has_begun and not self._has_headers and self._later_bytes > self.limits.header_bytes:
            self._refuse(*self._too_large())
        elif self._has_headers or self._is_responding():
            self._stop_timer("headers")
        else:
            self.waiting[self] = None
            self._start_timer("headers", self.limits.header_seconds, self._on_slow_headers)

    def _feed(self, data: bytes) -> bytes:
        """Parse data. Returns data that must be parsed next."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser has stopped after the headers. Parse them again without those that ask for an upgrade.
            return self._headers_without_upgrade() + data[upgrade.args[0] :]
        return b""

    def _headers_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refusal = (400, "The server is not a proxy.")
            raise httptools.HttpParserError
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        if hasattr(self.parser, "set_dangerous_leniencies"):  # as uvicorn sets it
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_upgrade = False
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun, self._has_headers, self._is_upgrade, self._has_body = True, False, False, False
        self._num_headers = self._parsed_bytes = self._later_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        if not self._has_headers:  # trailers of a body are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._is_upgrade = True
            return
        if len(self.pipeline) >= self.limits.pipelined:
            self._refusal = (400, f"More than {self.limits.pipelined} requests wait on one connection.")
            raise _RefusedError
        self.url = _path_and_query(self.url)
        self._check_target()
        self._has_headers = True
        super().on_headers_complete()
        self.cycle.transport = self._response_transport
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _Http10Cycle
            self.cycle.waiting_for_100_continue = False  # HTTP/1.0 has no such answer
        self._start_timer("body", self.limits.body_seconds, self._on_slow_body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        start = partial(super()._start_asgi_task, cycle, app)
        self.starts.start(self.loop, start, at_once=cycle.scope["path"] in _PROBES)

    def _check_target(self) -> None:
        if _has_dot_segments(self.url):
            self._refusal = (400, "The path has the segment . or .., which must be resolved before it is sent.")
        else:
            hosts = [value for name, value in self.headers if name == b"host"]
            self._refusal = host_problem(hosts, self.known_hosts, is_required=self.parser.get_http_version() != "1.0")
        if self._refusal is not None:
            raise _RefusedError

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)
        if self.cycle.response_complete:
            self._discard(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._has_begun = self._has_headers = False
        if self._is_ending:
            self._close()
            return
        self._stop_timer("body")
        super().on_message_complete()
        if self._is_responding():
            self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            # The transport waits until the client has read the response.
            self._start_timer("write", self.limits.write_seconds, self.transport.abort)
        elif not self._is_responding():
            self.waiting[self] = None

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._num_headers > self.limits.headers or self._parsed_bytes > self.limits.header_bytes:
            self._refusal = self._too_large()
            raise _RefusedError

    def _too_large(self) -> tuple[int, str]:
        limits = self.limits
        return 431, f"A request may have at most {limits.headers} headers of {limits.header_bytes} bytes together."

    def _is_responding(self) -> bool:
        return self.cycle is not None and (not self.cycle.response_complete or bool(self.pipeline))

    # Deadlines

    def _on_slow_headers(self) -> None:
        if self._is_responding():
            return
        if self._has_begun:
            self._refuse(408, f"The headers did not arrive within {self.limits.header_seconds:g} seconds.")
        else:
            self._close()

    def _on_slow_body(self) -> None:
        if self.pipeline:  # the request waits for an earlier one, and its body is not read meanwhile
            self._start_timer("body", self.limits.body_seconds, self._on_slow_body)
        elif self.cycle.response_complete:
            self._close()
        else:
            self._refuse(408, f"The body did not arrive within {self.limits.body_seconds:g} seconds.")

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _start_timer(self, name: str, seconds: float, action: Any) -> None:
        """Call `action` in `seconds`, unless the timer of this name already runs."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self._on_timer, name, action)

    def _on_timer(self, name: str, action: Any) -> None:
        del self._timers[name]
        action()

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    # Refusals

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, if no response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self._has_headers and self.cycle.response_complete:  # the rest of its body is wrong, and it has its answer
            self._close()
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            content = msgspec.json.encode(error_body(status, message))
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            retry = "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(f"{head}{retry}content-length: {len(content)}\r\n\r\n".encode() + content)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if status == 503:  # there are too many connections
            self._close()
            return
        self._is_discarding = True
        self._write_eof()
        self._start_timer("discard", _DISCARDING_SECONDS, self._close)

    def _write_eof(self) -> None:
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()

    def _discard(self, data: bytes) -> None:
        self._discarded_bytes += len(data)
        if self._discarded_bytes > _DISCARDED_BYTES:
            self._close()

    def close_after_body(self) -> None:
        """Close once the request that was answered has been received; its rest is discarded."""
        if not (self._has_begun and self._has_headers) or (self.expect_100_continue and not self._has_body):
            self._close()
            return
        self._is_ending = True
        self._write_eof()

    def _close(self) -> None:
        """Close after the data that was written has been sent."""
        self.transport.close()
        self._start_timer("write", self.limits.write_seconds, self.transport.abort)

"""What surrounds every request: its id, its deadline, its trace, and its line in the access log."""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from contextvars import ContextVar
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.runtime.logs import current_request_id
from compile_and_serve.serve.errors import MAX_ECHO, error_response, path_of, to_api_error
from compile_and_serve.serve.ledger.book import LedgerBook
from compile_and_serve.serve.observe.tracing import Tracing, current_trace

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
TIMEOUT_HEADER = "X-Request-Timeout"
_HAS_STARTED = "response_started"  # key of the request's state
_ALLOWED_ID = re.compile(r"[!-~]{1,256}")  # visible ASCII

# time.monotonic() at which the request whose handler runs must have ended, and the limit in seconds; None: no limit.
current_deadline: ContextVar[tuple[float, float] | None] = ContextVar("current_deadline", default=None)


class RequestMiddleware:
    """Outermost of the application's own middleware: the request's id, its trace and its line in the log.

    The request's id is the client's X-Request-Id if it is 1 to 256 visible ASCII characters, else a new one. The response carries it,
    and so does every log line as JSON.
    """

    def __init__(self, app: ASGIApp, *, access_log: bool, book: LedgerBook, tracing: Tracing | None = None) -> None:
        self.app, self._book = app, book
        self._access_log = access_log
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _ALLOWED_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        current_request_id.set(request_id)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                state[_HAS_STARTED] = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        trace = self._tracing.begin(scope, request_id) if self._tracing is not None else None
        current_trace.set(trace)
        record = self._book.begin(scope, request_id)
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if record is not None:
                self._book.end(record, status)
            if trace is not None:
                if record is not None and record.sequences:
                    trace.add_ledger(self._book.summary(record))
                trace.end(status)
            if self._access_log:
                _log(scope, status, time.monotonic() - began, request_id)


class DeadlineMiddleware:
    """The request's deadline, and the answer to exceptions that no handler caught. Inside of CORS: web pages read its errors too.

    timeout: seconds after which a request ends; a client may set fewer with X-Request-Timeout.
    """

    def __init__(self, app: ASGIApp, *, timeout: float | None = None) -> None:
        self.app = app
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        problem = self._set_deadline(Headers(scope=scope).get(TIMEOUT_HEADER))
        if problem is not None:
            await error_response(400, problem, TIMEOUT_HEADER, path=path_of(scope))(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if scope["state"].get(_HAS_STARTED):  # half of a response is sent; uvicorn closes the connection
                raise
            answer = to_api_error(error)
            await error_response(answer.status, answer.message, answer.param, answer.headers, path=path_of(scope))(scope, receive, send)

    def _set_deadline(self, given: str | None) -> str | None:
        """Set `current_deadline`. Returns one sentence if the client's header is wrong."""
        limit = self._timeout
        if given is not None:
            try:
                seconds = float(given)
            except ValueError:
                seconds = math.nan
            if not 0 < seconds < math.inf:
                return f"{TIMEOUT_HEADER} must be a number of seconds above 0, got {given[:MAX_ECHO]!r}."
            limit = seconds if limit is None else min(limit, seconds)
        current_deadline.set(None if limit is None else (time.monotonic() + limit, limit))
        return None


def public_id(prefix: str, wanted: str | None, request: Request) -> str:
    """A request's public id: from the body, else the one of `RequestMiddleware`, which logs it."""
    return f"{prefix}-{wanted or request.scope['state']['request_id']}"


def _log(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    client = scope.get("client")
    where = f"{client[0]}:{client[1]}" if client else "unix"
    method, path = scope["method"], quote(scope["path"])[:MAX_ECHO]
    # No query: it may contain what a client would rather not see in a log.
    logger.info(
        '%s "%s %s" %d, %.3f s [%s]',
        where,
        method,
        path,
        status,
        seconds,
        request_id,
        extra={"client": where, "method": method, "path": path, "status": status, "seconds": round(seconds, 4), "request_id": request_id},
    )

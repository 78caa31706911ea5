"""ASGI middleware: API keys and the limit on body size. Plain ASGI, so that handlers still see a client's disconnect."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.serve.errors import error_response

# Probes, documentation and metrics need no key.
_PUBLIC = frozenset({"/", "/health", "/ready", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"})
_PUBLIC_PREFIXES = ("/docs/", "/static-offline-docs/")


# Browsers can ask the user for a password but cannot send a bearer token, so pages also accept basic authentication.
_PAGES = frozenset({"/graphs"})
_BASIC_CHALLENGE = 'Basic realm="compile-and-serve: any user name, the API key as the password", charset="UTF-8"'


class ApiKeyMiddleware:
    """Answers 401 unless the request carries one of the keys as `Authorization: Bearer KEY`.

    Pages also accept the key as the password of basic authentication.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or _is_public(scope) or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": _BASIC_CHALLENGE} if _path(scope) in _PAGES else None
        message = "This server requires an API key: send it as 'Authorization: Bearer KEY'."
        await error_response(401, message, headers=headers)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        key = key.strip()
        if kind.lower() == "basic" and _path(scope) in _PAGES:
            key = _password(key)
        elif kind.lower() != "bearer":
            return False
        given = _digest(key)
        # Digests have equal lengths and there is no early exit, so the time taken reveals nothing about the keys.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


class BodyLimitMiddleware:
    """Answers 400 to a body of more than `max_bytes`, as soon as that is known."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"The body is larger than this server's limit of {self._max_bytes} bytes."
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            await error_response(400, message, headers={"Connection": "close"})(scope, receive, send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(400, message)
            return part

        await self.app(scope, counted_receive, send)


def _is_public(scope: Scope) -> bool:
    path = _path(scope)
    return path in _PUBLIC or path.startswith(_PUBLIC_PREFIXES)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


def _password(credentials: str) -> str:
    """The password in basic credentials (base64 of user:password). Malformed ones give "", which is never a key."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

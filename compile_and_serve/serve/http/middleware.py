"""ASGI middleware: API keys and the limit on body size. Plain ASGI, so that handlers still see a client's disconnect."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.serve.errors import error_response, path_of

# Probes and documentation need no key.
_PUBLIC = frozenset({"/", "/requests", "/health", "/ready", "/ping", "/version", "/docs", "/redoc", "/openapi.json"})
_PUBLIC_PREFIXES = ("/docs/", "/static-offline-docs/")


# Browsers can ask the user for a password but cannot send a bearer token, so pages also accept basic authentication.
_PAGES = frozenset({"/graphs"})
_BASIC_CHALLENGE = 'Basic realm="compile-and-serve: any user name, the API key as the password", charset="UTF-8"'
_TENANT, _IS_ADMIN = "tenant", "is_admin"  # keys of the request's state


class ApiKeyMiddleware:
    """Answers 401 unless the request carries one of the keys as `Authorization: Bearer KEY`, or as Anthropic's `x-api-key`.

    Pages also accept the key as the password of basic authentication. public: paths that need no key, besides the probes
    and the documentation. admin_paths: where there are admin keys, these paths need one of them, and other keys get 403.
    Admin keys open everything else too. Without api_keys, all other paths are open.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        admin_paths: Collection[str] = (),
        public: Sequence[str] = (),
    ) -> None:
        self.app = app
        self._admin_digests = [_digest(key.encode()) for key in admin_keys]
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._admin_paths = frozenset(admin_paths if admin_keys else ())
        self._public = _PUBLIC.union(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        is_admin_path = path_of(scope) in self._admin_paths
        digest = self._matching_digest(scope)
        if digest is not None and (not is_admin_path or digest in self._admin_digests):
            scope.setdefault("state", {}).update({_TENANT: digest.hex(), _IS_ADMIN: digest in self._admin_digests})
            await self.app(scope, receive, send)
            return
        path = path_of(scope)
        if digest is not None:
            message = "This route needs the admin key (--admin-api-key)."
            await error_response(403, message, path=path)(scope, receive, send)
            return
        headers = {"WWW-Authenticate": _BASIC_CHALLENGE} if path in _PAGES else None
        kind = "the admin API key" if is_admin_path else "an API key"
        message = f"This server requires {kind}: send it as 'Authorization: Bearer KEY'."
        await error_response(401, message, headers=headers, path=path)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        if path_of(scope) in self._admin_paths:
            return False
        return not self._digests or scope["method"] == "OPTIONS" or self._is_public(scope)

    def _is_public(self, scope: Scope) -> bool:
        path = path_of(scope)
        return path in self._public or path.startswith(_PUBLIC_PREFIXES)

    def _matching_digest(self, scope: Scope) -> bytes | None:
        """The digest of the request's key, or None if it has no valid key."""
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if not kind and "x-api-key" in headers:
            kind, key = "bearer", headers["x-api-key"]
        key = key.strip()
        if kind.lower() == "basic" and path_of(scope) in _PAGES:
            given = [_password(key).encode()]
        elif kind.lower() == "bearer":
            # `Headers` decodes as Latin-1. Clients send a key as UTF-8 or as Latin-1.
            given = [key.encode("latin-1"), key.encode()]
        else:
            return None
        # Digests have equal lengths and there is no early exit, so the time taken reveals nothing about the keys.
        digests = [_digest(one) for one in given]
        known_digests = [*self._admin_digests, *self._digests]
        matches = [known for known in known_digests for one in digests if hmac.compare_digest(known, one)]
        return matches[0] if matches else None


def tenant_digest(scope: Scope) -> str | None:
    """A digest of the API key that a request was authenticated with; None for a server without keys, and for its public paths."""
    digest: str | None = scope.get("state", {}).get(_TENANT)
    return digest


def tenant_of(request: Request) -> str | None:
    """`tenant_digest` of a request."""
    return tenant_digest(request.scope)


def is_admin(request: Request) -> bool:
    """Whether the request was authenticated with an admin key."""
    return bool(request.scope.get("state", {}).get(_IS_ADMIN))


def cache_salt(given: str | None, request: Request, api_keys: Sequence[str]) -> str | None:
    """The salt of a request's prefix cache: the client's, and with several API keys also the digest of the request's key."""
    tenant = tenant_of(request)
    if tenant is None or len(api_keys) < 2:
        return given
    return f"{tenant}:{given or ''}"


_CLOSE = {"Connection": "close"}  # the rest of the body is not read


def body_too_large(max_bytes: int) -> HTTPException:
    """The answer to a body of more than `max_bytes`."""
    message = f"The body is larger than this server's limit of {max_bytes} bytes (--max-body-size)."
    return HTTPException(413, message, headers=_CLOSE)


class BodyLimitMiddleware:
    """Answers 413 to a body of more than `max_bytes`, as soon as that is known. of_paths: beginnings of paths that have limits of their
    own.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, of_paths: Mapping[str, int] | None = None) -> None:
        self.app = app
        self._max_bytes, self._of_paths = max_bytes, dict(of_paths or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = path_of(scope)
        max_bytes = next((limit for prefix, limit in self._of_paths.items() if path.startswith(prefix)), self._max_bytes)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > max_bytes:
            error = body_too_large(max_bytes)
            await error_response(413, error.detail, headers=_CLOSE, path=path)(scope, receive, send)
            return
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > max_bytes:
                raise body_too_large(max_bytes)
            return part

        await self.app(scope, counted_receive, send)


def _password(credentials: str) -> str:
    """The password in basic credentials (base64 of user:password). Malformed ones give "", which is never a key."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""ASGI middleware that answers HEAD and OPTIONS requests, which probes, proxies and load balancers send."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ProbeMiddleware:
    """HEAD gets the headers of GET. OPTIONS gets 204 with the header Allow on every route that there is.

    A web page's question whether it may send a request (CORS preflight) is no probe.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            elif method == "OPTIONS" and message["status"] == 405:
                headers = MutableHeaders(raw=list(message["headers"]))
                del headers["content-type"], headers["content-length"]
                headers["Allow"] = ", ".join(_with_implied(headers.get("allow", "").split(", ")))
                message = {**message, "status": 204, "headers": headers.raw}
            await send(message)

        if method == "HEAD":
            await self.app({**scope, "method": "GET"}, receive, send_without_body)
        elif method == "OPTIONS" and "access-control-request-method" not in Headers(scope=scope):
            await self.app(scope, receive, send_without_body)
        else:
            await self.app(scope, receive, send)


def _with_implied(methods: list[str]) -> list[str]:
    """The methods of a route with those that this middleware adds."""
    return sorted({*filter(None, methods), "OPTIONS", *(["HEAD"] if "GET" in methods else [])})

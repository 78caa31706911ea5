"""Admin routes: their paths, the check of their requests, and the route class that the routers use.

They change the server for everyone. With `--admin-api-key` only that key opens them. Web pages may never call them: they get
no CORS headers, and a request that changes something must have the content type JSON, or none if no browser sent it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from compile_and_serve.serve.errors import path_of
from compile_and_serve.serve.http.json_body import JsonRoute, check_content_type

ADMIN_PATHS = frozenset(
    {
        "/start_profile",
        "/stop_profile",
        "/requests/data",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/server_info",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)


class AdminRoute(JsonRoute):
    """A route whose POST requests must have the content type JSON, also where it reads no body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if request.method != "GET":
                check_content_type(request)
            return await handler(request)

        return handle


class CorsExceptAdmin(CORSMiddleware):
    """`CORSMiddleware` that leaves admin routes alone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) in ADMIN_PATHS:
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

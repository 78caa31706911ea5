"""ASGI middleware: whose a request is, and whether its key may send it now."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.serve.errors import error_response, path_of
from compile_and_serve.serve.http.middleware import tenant_digest
from compile_and_serve.serve.observe.metrics import Metrics
from compile_and_serve.serve.tenants.current import current_tenant
from compile_and_serve.serve.tenants.rate_limits import RateLimits
from compile_and_serve.serve.tenants.registry import Tenants

_UNCOUNTED = "/cancel"  # ends work


class TenantMiddleware:
    """Sets `current_tenant`. Answers 429 to a POST request of a key that has used up its requests or tokens of the minute."""

    def __init__(self, app: ASGIApp, *, tenants: Tenants, rates: RateLimits, metrics: Metrics) -> None:
        self.app = app
        self._tenants, self._rates, self._metrics = tenants, rates, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._tenants.of(tenant_digest(scope)) if scope["type"] == "http" else None
        if options is None:
            await self.app(scope, receive, send)
            return
        current_tenant.set(self._tenants.message(options))
        path = path_of(scope)
        if not options.has_rates or scope["method"] != "POST" or path.endswith(_UNCOUNTED):
            await self.app(scope, receive, send)
            return
        try:
            answer = await self._rates.begin(options.name)
        except OSError:
            message = "The API process that counts this API key's requests is being started again."
            await error_response(503, message, path=path)(scope, receive, send)
            return
        headers = answer.headers()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        if answer.is_allowed:
            await self.app(scope, receive, send_with_headers)
            return
        self._metrics.observe_refused(options.name)
        used_up = "requests" if answer.requests is not None and answer.requests.wait_seconds > 0 else "tokens"
        limit = options.requests_per_minute if used_up == "requests" else options.tokens_per_minute
        message = f"This API key has used up its {limit} {used_up} a minute: try again in {answer.retry_after} seconds."
        refusal = error_response(429, message, headers={"Retry-After": str(answer.retry_after)}, path=path)
        await refusal(scope, receive, send_with_headers)

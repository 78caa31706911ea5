"""Load reports in response headers, for load balancers (ORCA, Open Request Cost Aggregation).

A request with the header `endpoint-load-metrics-format: TEXT` (or JSON) gets the engine's load in `endpoint-load-metrics`.
"""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compile_and_serve.serve.observe.metrics import Metrics
from compile_and_serve.serve.observe.throughput import total_load

FORMAT_HEADER, HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"


class OrcaMiddleware:
    """Adds the header to responses of POST requests. Unknown formats get none."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = ""
        if scope["type"] == "http" and scope["method"] == "POST":
            wanted = Headers(scope=scope).get(FORMAT_HEADER, "").strip().upper()
        if wanted not in ("TEXT", "JSON"):
            await self.app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                load = (HEADER.encode(), self._load(wanted).encode())
                message = {**message, "headers": [*message["headers"], load]}
            await send(message)

        await self.app(scope, receive, send_with_load)

    def _load(self, kind: str) -> str:
        """vLLM's names. The KV cache's usage is the mean of the replicas."""
        running, waiting, kv_usage = total_load(self._metrics.last_stats.values())
        named = {"kv_cache_usage_perc": round(kv_usage, 6), "num_requests_waiting": waiting, "num_requests_running": running}
        if kind == "JSON":
            return "JSON " + json.dumps({"named_metrics": named})
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())

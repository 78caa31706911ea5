"""OpenTelemetry traces: one span per API request, with its tokens and times. Needs the extra `otel`.

Attributes have the names that vLLM uses, which follow OpenTelemetry's conventions for generative AI. No text is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from compile_and_serve import __version__

if TYPE_CHECKING:
    from compile_and_serve.serve.observe.metrics import SequenceClock

logger = logging.getLogger(__name__)

_SERVER_ERROR = 500


class RequestTrace:
    """The span of one request. `sequence_finished` adds up what its sequences took."""

    def __init__(self, span: Any, tracer: Any) -> None:
        self._span, self._tracer = span, tracer
        self._prompt_tokens = self._new_tokens = 0
        self._first_token: float | None = None
        self._queue_seconds: float | None = None
        self._began = time.monotonic()

    def sequence_started(self, prompt_tokens: int) -> None:
        """A sequence has been sent to the engine."""
        self._prompt_tokens += prompt_tokens

    def sequence_queued(self, seconds: float) -> None:
        """A sequence was scheduled `seconds` after it had arrived."""
        self._queue_seconds = max(seconds, self._queue_seconds or 0.0)

    def sequence_finished(self, clock: SequenceClock, reason: str) -> None:
        """A sequence has ended. clock: its times and tokens."""
        self._new_tokens += clock.new_tokens
        if clock.new_tokens:
            seconds = clock.first_token - clock.arrival
            self._first_token = seconds if self._first_token is None else min(self._first_token, seconds)
        self._span.add_event("sequence finished", {"gen_ai.response.finish_reason": reason, "tokens": clock.new_tokens})

    def add_ledger(self, ledger: Mapping[str, Any]) -> None:
        """Add the request's stages as spans below its own, and what it missed as events. ledger: of `summarize`."""
        from opentelemetry.trace import set_span_in_context

        context, began = set_span_in_context(self._span), ledger["began"]
        for one in ledger["timeline"]:
            start = int((began + one["start"]) * 1e9)
            self._tracer.start_span(one["name"], context=context, start_time=start).end(start + int(one["seconds"] * 1e9))
        for sequence in ledger["sequences"]:
            for miss in sequence["misses"]:
                self._span.add_event("miss", {name: miss[name] for name in ("kind", "reason")})  # the sentence may hold text
        self._span.set_attribute("cas.why", ledger["why"])

    def end(self, status: int) -> None:
        """The response has ended. status: HTTP status, 0 if none was sent."""
        from opentelemetry.trace import StatusCode

        span = self._span
        span.set_attribute("http.response.status_code", status)
        if self._prompt_tokens:
            span.set_attribute("gen_ai.usage.prompt_tokens", self._prompt_tokens)
            span.set_attribute("gen_ai.usage.completion_tokens", self._new_tokens)
            span.set_attribute("gen_ai.latency.e2e", time.monotonic() - self._began)
        if self._first_token is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", self._first_token)
        if self._queue_seconds is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", self._queue_seconds)
        if status >= _SERVER_ERROR or status == 0:
            span.set_status(StatusCode.ERROR)
        span.end()


# Of the request whose handler runs.
current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)


class Tracing:
    """Exports spans in batches, from a thread. endpoint: URL of an OTLP/HTTP receiver.

    Raises `ValueError` if the packages of the extra `otel` are not installed.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ValueError("--otlp-traces-endpoint needs OpenTelemetry: install compile-and-serve[otel].") from None
        resource = Resource.create({"service.name": "compile-and-serve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("compile_and_serve.serve")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def begin(self, scope: Scope, request_id: str) -> RequestTrace | None:
        """A span for a request to the API, under the client's span if it sent `traceparent`. None for probes and pages."""
        from opentelemetry.trace import SpanKind

        if scope["method"] != "POST":
            return None
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"POST {scope['path'][:200]}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": "POST",
                "url.path": scope["path"][:200],
                "gen_ai.request.id": request_id,
                "gen_ai.response.model": self._model,
            },
        )
        return RequestTrace(span, self._tracer)

    def close(self) -> None:
        """Send the remaining spans. Waits for the receiver."""
        self._provider.shutdown()

"""OpenTelemetry traces as a collector receives them."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from compile_and_serve.serve.observe.tracing import Tracing
from tests.serve.conftest import ANSWER, StartServer

messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Receives spans over OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    content = gzip.decompress(content)
                request = messages.ExportTraceServiceRequest.FromString(content)
                for resource in request.resource_spans:
                    collector.resources.append(attributes(resource.resource))
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def attributes(owner: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in owner.attributes}


async def test_a_request_is_a_span(start_server: StartServer, collector: Collector) -> None:
    server = await start_server(otlp_traces_endpoint=collector.endpoint)
    headers = {"traceparent": PARENT, "X-Request-Id": "abc"}
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "n": 2, "stream": stream}
        assert (await server.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    assert (await server.http.post("/v1/completions", json={"prompt": 1.5})).status_code == 400
    await server.http.get("/health")
    await server.close()
    whole, streamed, wrong = (span for span in collector.spans if span.name.startswith("POST"))
    stages = [span for span in collector.spans if span.parent_span_id == streamed.span_id]
    assert [span.name for span in stages] == ["tokenize", "tokenize", "slots", "prefill", "decode"]
    for span in (whole, streamed):
        found = attributes(span)
        assert span.name == "POST /v1/chat/completions"
        assert span.trace_id.hex() == PARENT.split("-")[1]
        assert span.parent_span_id.hex() == PARENT.split("-")[2]
        assert found["gen_ai.request.id"] == "abc"
        assert found["http.response.status_code"] == 200
        num_tokens = len(server.tokenizer.encode(ANSWER, add_special_tokens=False)) + 1
        assert found["gen_ai.usage.completion_tokens"] == 2 * num_tokens
        assert found["gen_ai.latency.time_in_queue"] == 0.01
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        assert len(span.events) == 2
        assert ANSWER not in str(span)
    assert attributes(wrong)["http.response.status_code"] == 400
    assert "gen_ai.usage.prompt_tokens" not in attributes(wrong)
    assert collector.resources[0]["service.name"] == "compile-and-serve"


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"install compile-and-serve\[otel\]"):
        Tracing("http://127.0.0.1:9", "model")

"""Ids, deadlines, logs, keep-alive comments and Retry-After: what surrounds a request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.logs import JsonHandler
from compile_and_serve.serve.http.responses import COMMENT
from compile_and_serve.serve.observe.queue_speed import QueueSpeed
from compile_and_serve.serve.observe.throughput import ThroughputLog, TokenCounts
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.fake_engine import says

SECRET = "the launch code is 0000"


async def test_the_request_id_comes_back_and_names_the_answer(server: Server) -> None:
    for given in ("trace-7", None, "line\tbreak", "x" * 257, "é"):
        headers = {} if given is None else {b"X-Request-Id": given.encode()}
        body = {"prompt": "Hi", "max_tokens": 2}
        response = await server.http.post("/v1/completions", json=body, headers=headers)  # type: ignore[arg-type]
        request_id = response.headers["x-request-id"]
        assert response.json()["id"] == f"cmpl-{request_id}"
        assert (request_id == given) is (given == "trace-7")
        assert re.fullmatch("trace-7|[0-9a-f]{32}", request_id)


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "/metrics"])
async def test_every_response_has_an_id(start_server: StartServer, path: str) -> None:
    server = await start_server(api_keys=("secret",))
    response = await server.http.get(path, headers={"X-Request-Id": "abc"})
    assert response.headers["x-request-id"] == "abc"


async def test_an_unexpected_error_is_a_logged_500_with_an_id(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    @server.app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("bug")

    response = await server.http.get("/broken", headers={"X-Request-Id": "abc"})
    assert response.status_code == 500
    assert "bug" not in response.text
    assert response.headers["x-request-id"] == "abc"
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"]


async def test_web_pages_may_read_errors(start_server: StartServer) -> None:
    server = await start_server(allowed_origins=("https://app.example",))

    @server.app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("bug")

    for path, headers, status in (("/health", {"X-Request-Timeout": "no"}, 400), ("/broken", {}, 500)):
        response = await server.http.get(path, headers={"Origin": "https://app.example", **headers})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in response.headers


async def test_json_log_lines_have_the_id_and_no_prompt(server: Server) -> None:
    handler = JsonHandler()
    handler.setStream(io.StringIO())
    ours = logging.getLogger("compile_and_serve")
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        headers = {"X-Request-Id": "abc"}
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 100, "stream": stream}
            await server.http.post("/v1/chat/completions?key=hidden", json=body, headers=headers)
        await server.http.post("/v1/chat/completions", json={"messages": SECRET}, headers=headers)
        await server.http.post("/v1/completions", content=SECRET, headers=headers)
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
    text = handler.stream.getvalue()
    for hidden in (SECRET, ANSWER, "hidden"):
        assert hidden not in text
    lines = [json.loads(line) for line in text.splitlines()]
    access = [line for line in lines if line["logger"] == "compile_and_serve.serve.http.request_scope"]
    assert [line["status"] for line in access] == [200, 200, 400, 400]
    for line in access:
        assert line["request_id"] == "abc"
        assert line["method"] == "POST"
        assert line["seconds"] >= 0
        assert line["level"] == "info"
        assert line["timestamp"].endswith("Z")


def test_json_log_lines_of_errors_and_children() -> None:
    handler = JsonHandler("rank 1")
    handler.setStream(io.StringIO())
    try:
        raise ValueError("wrong\nsecond line")
    except ValueError as error:
        logger = logging.Logger("some.where")
        logger.addHandler(handler)
        logger.error("It failed: %s", "é", exc_info=error)
    [line] = handler.stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["event"] == "It failed: é"
    assert record["process"] == "rank 1"
    assert "ValueError: wrong\nsecond line" in record["exception"]


async def test_access_log_can_be_off(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "compile_and_serve")
    server = await start_server(access_log=False)
    await server.http.get("/health")
    assert not [record for record in caplog.records if "/health" in record.getMessage()]
    server = await start_server()
    await server.http.get("/health", headers={"X-Request-Id": "abc"})
    [line] = [record.getMessage() for record in caplog.records if "/health" in record.getMessage()]
    assert re.search(r'"GET /health" 200, 0\.\d{3} s \[abc\]$', line)


# Deadlines


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True, **fields}


async def endless(start_server: StartServer, **settings: Any) -> Server:
    script: Callable[..., Any] = lambda request: [65, 66]  # noqa: E731
    return await start_server(script=script, engine={"pause": 0.05}, **settings)


@pytest.mark.parametrize("how", ["header", "server", "lower header"])
async def test_a_request_ends_at_its_deadline(start_server: StartServer, how: str) -> None:
    settings = {"server": {"request_timeout": 0.5}, "lower header": {"request_timeout": 60.0}}.get(how, {})
    headers = {} if how == "server" else {"X-Request-Timeout": "0.5"}
    server = await endless(start_server, **settings)
    await server.http.post("/tokenize", json={"messages": []})  # starts the process that renders
    response = await server.http.post("/v1/chat/completions", json=body(n=2), headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"
    assert "within its limit of 0.5 seconds" in response.json()["error"]["message"]
    await eventually(lambda: len(server.engine.aborted) == 2)
    assert server.engine.num_running == 0
    metrics = (await server.http.get("/metrics")).text
    assert 'cas:request_success_total{finished_reason="error",model_name="test-model"} 2.0' in metrics


async def test_a_stream_ends_at_its_deadline_with_an_error_event(start_server: StartServer) -> None:
    server = await endless(start_server)
    headers = {"X-Request-Timeout": "0.5"}
    response = await server.http.post("/v1/chat/completions", json=body(stream=True), headers=headers)
    assert response.status_code == 200
    *_, failed, done = response.text.strip().split("\n\n")
    assert json.loads(failed.removeprefix("data: "))["error"]["code"] == 504
    assert done == "data: [DONE]"
    await eventually(lambda: server.engine.num_running == 0)


async def test_a_fast_request_meets_its_deadline(server: Server) -> None:
    response = await server.http.post("/v1/chat/completions", json=body(), headers={"X-Request-Timeout": "30"})
    assert response.status_code == 200


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf"])
async def test_a_wrong_deadline_is_a_400(server: Server, given: str) -> None:
    response = await server.http.post("/v1/chat/completions", json=body(), headers={"X-Request-Timeout": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


# Keep-alive comments


async def test_a_silent_stream_gets_comments(start_server: StartServer, over_tcp: Callable[[Server], Any], tokenizer: Any) -> None:
    server = await start_server(stream_keepalive=0.05)
    server.engine.hold.clear()
    url = await over_tcp(server)
    received = b""
    async with httpx.AsyncClient() as http:
        async with http.stream("POST", url + "/v1/chat/completions", json=body(stream=True, ignore_eos=False)) as response:
            async for part in response.aiter_raw():
                received += part
                if received.count(COMMENT) == 3:
                    server.engine.hold.set()
    assert received.endswith(b"data: [DONE]\n\n")
    events = [json.loads(e[6:]) for e in received.decode().split("\n\n") if e.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == ANSWER


@pytest.mark.parametrize("seconds", [0.0, 15.0])
async def test_no_comments_without_silence(start_server: StartServer, tokenizer: Any, seconds: float) -> None:
    server = await start_server(stream_keepalive=seconds, engine={"pause": 0.01}, script=says(tokenizer, ANSWER))
    response = await server.http.post("/v1/chat/completions", json=body(stream=True, ignore_eos=False))
    assert COMMENT.decode() not in response.text
    assert response.text.endswith("data: [DONE]\n\n")


# Retry-After


def test_queue_speed() -> None:
    speed = QueueSpeed()
    assert speed.seconds_until(1, now=0.0) == 1
    speed.started(100.0)
    assert speed.seconds_until(1, now=107.5) == 8  # none has ended in 7.5 seconds
    for end in (108.0, 110.0):
        speed.finished(2, end, in_flight=5)
    assert speed.seconds_until(4, now=110.0) == 10  # 4 in 10 seconds
    assert speed.seconds_until(10, now=110.0) == 25
    assert speed.seconds_until(1000, now=110.0) == 120
    assert speed.seconds_until(1, now=139.0) == 15  # two of the four are older than 30 seconds
    assert speed.seconds_until(1, now=500.0) == 30
    speed.finished(1, 500.0, in_flight=0)
    speed.started(600.0)
    assert speed.seconds_until(1, now=600.0) == 1


async def test_retry_after_follows_the_queue(start_server: StartServer, tokenizer: Any) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"max_in_flight": 2})
    server.engine.hold.clear()
    running = [asyncio.create_task(server.chat(max_tokens=5)) for _ in range(2)]
    await eventually(lambda: server.engine.num_running == 2)
    engine = server.app.state.context.engine
    engine.speed = QueueSpeed()
    now = asyncio.get_running_loop().time()
    engine.speed.started(now - 12)
    engine.speed.finished(3, now - 1, in_flight=2)  # one in four seconds
    refused = await server.chat(max_tokens=5)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] in ("4", "5")
    server.engine.hold.set()
    assert [(await task).status_code for task in running] == [200, 200]


# Throughput


def test_throughput_line_only_under_load(caplog: pytest.LogCaptureFixture) -> None:
    from compile_and_serve.runtime.messages import EngineStats

    caplog.set_level(logging.INFO, "compile_and_serve")
    tokens, stats = TokenCounts(), {0: EngineStats(), 1: EngineStats()}
    log = ThroughputLog(tokens, stats)
    log.write()
    assert not caplog.records
    log._at -= 10
    tokens.prompt, tokens.generation = 1000, 500
    stats[0] = EngineStats(num_running=3, num_waiting=2, kv_cache_usage=0.5, prefix_cache_queries=800, prefix_cache_hits=200)
    stats[1] = EngineStats(num_running=1, kv_cache_usage=0.25)
    log.write()
    [record] = caplog.records
    fields: Any = record.__dict__
    assert 90 < fields["prompt_tokens_per_second"] <= 100
    assert 45 < fields["generation_tokens_per_second"] <= 50
    assert (fields["running"], fields["waiting"], fields["kv_cache_usage"]) == (4, 2, 0.375)
    assert "4 running, 2 waiting; KV cache 37.5 % used, prefix hits 25.0 %" in record.getMessage()
    stats.update({0: EngineStats(prefix_cache_queries=800, prefix_cache_hits=200), 1: EngineStats()})
    log.write()
    assert len(caplog.records) == 1


async def test_the_server_logs_its_throughput(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "compile_and_serve")
    server = await endless(start_server, throughput_log=0.1)
    await server.http.post("/v1/chat/completions", json=body(max_tokens=30))
    lines = [record for record in caplog.records if record.name.endswith(".throughput")]
    assert lines
    assert sum(vars(line)["generation_tokens_per_second"] for line in lines) > 0

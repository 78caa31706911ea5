"""`--api-server-count`: several API processes on one port behave as one server, to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.serve.api_process import ForwardMiddleware
from compile_and_serve.serve.observe.metrics import MetricFamily, Metrics, render_families, sum_families
from tests.support.processes import wait_until
from tests.support.server_process import ServerProcess

OPTIONS = ("--port", "0", "--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-model-len", "512")
SIZES = ("--max-num-seqs", "16", "--num-threads", "1", "--served-model-name", "tiny", "--response-role", "assistant")
TEXTS = ["Once upon a time", "The sea is", "Ünïcode 🙂 and", "One two three", "A", "Hello there, you", "x y z", "Why"]


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    flags = ("--api-server-count", "2", "--enable-admin-routes", "--max-waiting", "64", "--response-store", "1MiB")
    server = ServerProcess(str(tiny_llama_dir), *flags, *OPTIONS, *SIZES)
    yield server
    assert server.stop() == 0, server.output
    assert "Traceback" not in server.output


def api_pids(server: ServerProcess) -> list[int]:
    """The API processes: children of the server that listen."""
    listening = []
    port = int(server.url.rpartition(":")[2])
    text = Path("/proc/net/tcp").read_text()
    inodes = {line.split()[9] for line in text.splitlines()[1:] if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"}
    for pid in server.engine_pids():
        links = open_files(pid)
        if any(f"socket:[{inode}]" in links for inode in inodes):
            listening.append(pid)
    return listening


def open_files(pid: int) -> set[str]:
    """What a process's descriptors point to, without those that are closed while this looks."""
    links = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for file in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.add(os.readlink(f"/proc/{pid}/fd/{file}"))
    return links


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}


def normalized(content: bytes) -> bytes:
    """An answer without what differs between two requests."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", content)


def joined(stream: str) -> bytes:
    """Text, tokens and end of a stream. Where it is divided into chunks depends on the load."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    assert len(tokens) == 40
    return json.dumps([text, tokens, choices[-1]["finish_reason"], chunks[-1]["usage"]]).encode()


async def fetch_all(url: str, *, count: int, stream: bool) -> list[bytes]:
    """Each on a connection of its own, so that they spread over the processes."""

    async def fetch(number: int) -> bytes:
        async with httpx.AsyncClient(timeout=120) as http:
            fields = {"stream": stream, "return_token_ids": True, **({"stream_options": {"include_usage": True}} if stream else {})}
            response = await http.post(url + "/v1/completions", json=body(TEXTS[number % len(TEXTS)], **fields))
            assert response.status_code == 200, response.text
            return joined(response.text) if stream else normalized(response.content)

    return await asyncio.gather(*(fetch(number) for number in range(count)))


def samples(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("cas:")}


@pytest.mark.slow
async def test_streams_are_those_of_one_process(server: ServerProcess, tiny_llama_dir: Path) -> None:
    assert len(api_pids(server)) == 2
    with httpx.Client() as http:
        before = samples(http.get(server.url + "/metrics").text)
    single = ServerProcess(str(tiny_llama_dir), *OPTIONS, *SIZES)
    try:
        for stream in (True, False):
            expected = await fetch_all(single.url, count=len(TEXTS), stream=stream)
            got = await fetch_all(server.url, count=2 * len(TEXTS), stream=stream)
            assert got == expected * 2
    finally:
        single.stop()
    for _ in range(6):  # whichever process answers
        with httpx.Client() as http:
            after = samples(http.get(server.url + "/metrics").text)
        finished = 'cas:request_success_total{finished_reason="length",model_name="tiny"}'
        assert after[finished] - before.get(finished, 0.0) == 4 * len(TEXTS)
        tokens = 'cas:generation_tokens_total{model_name="tiny"}'
        assert after[tokens] - before[tokens] == 4 * len(TEXTS) * 40
        assert after['cas:num_requests_running{model_name="tiny"}'] == 0
        steps = 'cas:iteration_tokens_total_sum{model_name="tiny"}'
        assert after[steps] >= after[tokens]
        assert after[steps] < 2 * after[tokens]  # each step is counted once


async def test_a_disconnect_frees_the_slot(server: ServerProcess) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        request = body("Once", max_tokens=480, stream=True)
        async with http.stream("POST", server.url + "/v1/completions", json=request) as response:
            async for _ in response.aiter_bytes():
                break
    end = time.monotonic() + 30
    while True:
        with httpx.Client() as http:
            if http.get(server.url + "/load").json()["server_load"] == 0:
                break
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_queue_limit_is_common(server: ServerProcess) -> None:
    async def one() -> httpx.Response:
        async with httpx.AsyncClient(timeout=120) as http:
            return await http.post(server.url + "/v1/completions", json=body("Once", max_tokens=200))

    responses = await asyncio.gather(*(one() for _ in range(120)))
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 80  # 16 run and 64 wait
    for response in responses:
        if response.status_code == 503:
            assert 1 <= int(response.headers["retry-after"]) <= 120
            assert "but the server accepts 80" in response.text


async def test_all_processes_sleep_and_wake(server: ServerProcess) -> None:
    async def statuses() -> list[int]:
        found = []
        for _ in range(8):
            async with httpx.AsyncClient(timeout=60) as http:
                found.append((await http.post(server.url + "/v1/completions", json=body("x", max_tokens=2))).status_code)
        return found

    with httpx.Client(timeout=60) as http:
        assert http.post(server.url + "/sleep").json() == {"is_sleeping": True}
        assert await statuses() == [503] * 8
        assert http.post(server.url + "/wake_up").json() == {"is_sleeping": False}
    assert await statuses() == [200] * 8


def test_a_stored_response_is_found_by_every_process(server: ServerProcess) -> None:
    for _ in range(4):
        with httpx.Client(timeout=60) as http:
            made = http.post(server.url + "/v1/responses", json={"input": "Hi", "max_output_tokens": 16})
        assert made.status_code == 200, made.text
        for _ in range(4):
            with httpx.Client(timeout=60) as http:
                found = http.get(f"{server.url}/v1/responses/{made.json()['id']}")
            assert found.status_code == 200
            assert found.json() == made.json()
    with httpx.Client(timeout=60) as http:
        stream = {"input": "Hi", "max_output_tokens": 16, "stream": True}
        assert "event: response.incomplete" in http.post(server.url + "/v1/responses", json=stream).text
        assert http.post(server.url + "/v1/responses", content=b"{").status_code == 400
        for _ in range(4):
            large = b'{"input": "' + b"x" * (5 << 20) + b'"}'
            assert http.post(server.url + "/v1/responses", content=large).status_code == 413


async def test_forwarding_leaves_the_prefix_of_a_proxy_to_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded: list[httpx.Request] = []

    async def answer(self: ForwardMiddleware, request: httpx.Request, receive: Any, send: Any) -> None:
        forwarded.append(request)

    messages = iter([{"type": "http.request", "body": b"x"}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    monkeypatch.setattr(ForwardMiddleware, "_answer", answer)
    forward = ForwardMiddleware(None, prefixes=("/v1/responses",), to="none", max_bytes=1)  # type: ignore[arg-type]
    scope = {"type": "http", "method": "POST", "root_path": "/proxy", "headers": [], "query_string": b"a=b"}
    path = "/proxy/v1/responses"
    await forward(scope | {"path": path, "raw_path": path.encode()}, receive, None)  # type: ignore[arg-type]
    assert [str(request.url) for request in forwarded] == ["http://first/v1/responses?a=b"]


def statuses(url: str, count: int = 8) -> list[int]:
    """Of one request on each of several connections; 0: the connection was reset."""
    found = []
    for number in range(count):
        with httpx.Client(timeout=60) as http:
            try:
                found.append(http.post(url + "/v1/completions", json=body(TEXTS[number % len(TEXTS)])).status_code)
            except httpx.TransportError:
                found.append(0)
    return found


@pytest.mark.slow
def test_a_process_that_dies_is_started_again(server: ServerProcess) -> None:
    """The others serve meanwhile. What all processes must know, the new one asks them."""
    for number in (1, 0):
        pids = api_pids(server)
        assert len(pids) == 2
        if number == 0:
            httpx.post(server.url + "/sleep", timeout=60).raise_for_status()
        os.kill(pids[number], signal.SIGKILL)
        wait_until(lambda gone=pids[number]: gone not in server.engine_pids(), 30)  # type: ignore[misc]
        if number == 1:
            assert 200 in statuses(server.url)
        wait_until(lambda: len(api_pids(server)) == 2, 60)
        assert set(statuses(server.url)) == {503 if number == 0 else 200}
        if number == 0:
            httpx.post(server.url + "/wake_up", timeout=60).raise_for_status()
        assert set(statuses(server.url)) == {200}
        answer = httpx.post(server.url + "/v1/responses", json={"input": "Hi", "max_output_tokens": 4}, timeout=60)
        assert answer.status_code == 200  # by process 0, whoever takes it
        assert httpx.get(server.url + "/metrics", timeout=60).status_code == 200
    assert server.output.count("was ended by signal 9, and is started again") == 2


@pytest.mark.exhaustive
def test_the_death_of_all_processes_ends_the_server(tiny_llama_dir: Path) -> None:
    """Nobody is left who knows the state."""
    server = ServerProcess(str(tiny_llama_dir), "--api-server-count", "2", *OPTIONS, *SIZES)
    for pid in api_pids(server):
        os.kill(pid, signal.SIGKILL)
    assert server.wait(120) == 1
    assert "was ended by signal 9" in server.output
    assert "so the server ends" in server.output


@pytest.mark.slow
async def test_the_death_of_the_engine_ends_the_requests_of_every_process(tiny_llama_dir: Path) -> None:
    server = ServerProcess(str(tiny_llama_dir), "--api-server-count", "2", *OPTIONS, *SIZES)
    [engine] = [pid for pid in server.engine_pids() if b"runtime.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    async def read(begun: asyncio.Event) -> str:
        text = ""
        async with httpx.AsyncClient(timeout=60) as http:
            request = body("Once", max_tokens=480, stream=True)
            async with http.stream("POST", server.url + "/v1/completions", json=request) as response:
                async for part in response.aiter_text():
                    begun.set()
                    text += part
        return text

    begun = [asyncio.Event() for _ in range(8)]
    streams = [asyncio.create_task(read(event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(engine, signal.SIGKILL)
    for text in await asyncio.gather(*streams):
        assert "The engine process was ended by signal 9." in text
    assert await asyncio.to_thread(server.wait, 60) == 1
    assert "Traceback" not in server.output


@pytest.mark.exhaustive
def test_a_killed_server_leaves_no_folder(tiny_llama_dir: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(short_dir))
    server = ServerProcess(str(tiny_llama_dir), "--api-server-count", "2", *OPTIONS, *SIZES)
    server.process.kill()
    assert server.wait() == -signal.SIGKILL
    wait_until(lambda: not list(short_dir.glob("cas-*")))


@pytest.mark.slow
def test_metrics_of_processes_are_summed() -> None:
    info = EngineInfo(max_model_len=8, vocab_size=8, num_kv_blocks=4, block_size=4, dtype="float32", device="cpu")
    parts: list[list[MetricFamily]] = []
    for count in (1, 2):
        metrics = Metrics("m")
        metrics.describe_engine(info)
        for _ in range(count):
            metrics.observe_aborted([metrics.start(3)])
        parts.append(metrics.families())
    text = render_families(sum_families(parts)).decode()
    assert 'cas:request_success_total{finished_reason="abort",model_name="m"} 3.0' in text
    assert 'cas:request_prompt_tokens_bucket{le="5.0",model_name="m"} 3.0' in text
    assert 'cas:request_prompt_tokens_sum{model_name="m"} 9.0' in text
    assert re.search(r"cas:engine_info\{.*\} 1\.0", text)
    single = Metrics("m")
    single.describe_engine(info)
    names = [line.split("{")[0] for line in text.splitlines()]
    assert names == [line.split("{")[0] for line in render_families(metrics.families()).decode().splitlines()]
    assert render_families(single.families()) == single.render()

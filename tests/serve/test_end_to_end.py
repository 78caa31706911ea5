"""A real server process with a tiny random model: SDK, streams, disconnects, shutdown, engine death, start-up errors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.server_process import ServerProcess
from tests.support.sse import read_events

OPTIONS = ("--port", "0", "--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-model-len", "512")
SIZES = ("--max-num-seqs", "16", "--num-threads", "1")
LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    names = ("--served-model-name", "tiny", "--enable-prompt-tokens-details")
    server = ServerProcess(str(tiny_llama_dir), *names, *OPTIONS, *SIZES)
    yield server
    assert server.stop() == 0, server.output


@pytest.fixture
def own_server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(str(tiny_llama_dir), "--shutdown-timeout", "60", *OPTIONS, *SIZES)
    yield server
    server.process.kill()
    server.wait()


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(server.url + "/metrics", timeout=60).text
    [line] = [line for line in text.splitlines() if line.startswith(f"cas:{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def eventually(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def test_sdk_streamed_and_not_are_equal(server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_alone_in_a_batch_and_from_the_cache_are_equal(server: ServerProcess) -> None:
    body = {**LONG, "max_tokens": 32, "prompt": ["The first prompt of several that are long", "abc", "The fir"]}
    with server.client() as http:
        alone = [http.post("/v1/completions", json={**body, "prompt": prompt}).json()["choices"][0]["text"] for prompt in body["prompt"]]
        batch = http.post("/v1/completions", json=body).json()
        again = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in batch["choices"]] == alone
    assert [choice["text"] for choice in again["choices"]] == alone
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_seed_repeats_and_n_differ(server: ServerProcess) -> None:
    body = {"prompt": "abc", "n": 3, "seed": 3, "temperature": 1, "max_tokens": 12, "ignore_eos": True}
    with server.client() as http:
        first, second = (http.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in second]
    assert len({c["text"] for c in first}) == 3


def test_stop_string_cuts_the_text_of_the_same_answer(server: ServerProcess) -> None:
    with server.client() as http:
        whole = http.post("/v1/completions", json={**LONG, "max_tokens": 32}).json()["choices"][0]["text"]
        stop = whole[5:8]
        for stream in (False, True):
            response = http.post("/v1/completions", json={**LONG, "max_tokens": 32, "stop": [stop], "stream": stream})
            if stream:
                *chunks, _ = read_events(response.text)
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                last = chunks[-1]["choices"][0]
            else:
                last = response.json()["choices"][0]
                text = last["text"]
            assert text == whole[: whole.index(stop)]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_echoed_logprobs_equal_prompt_logprobs(server: ServerProcess) -> None:
    with server.client() as http:
        echo = http.post("/v1/completions", json={"prompt": "Hello world", "echo": True, "logprobs": 1, "max_tokens": 0}).json()["choices"][
            0
        ]["logprobs"]
        entries = http.post("/v1/completions", json={"prompt": "Hello world", "prompt_logprobs": 1, "max_tokens": 1}).json()["choices"][0][
            "prompt_logprobs"
        ]
        ids = http.post("/tokenize", json={"prompt": "Hello world"}).json()["tokens"]
    assert len(echo["tokens"]) == len(ids) == len(entries)
    for token, logprob, entry in list(zip(ids, echo["token_logprobs"], entries, strict=True))[1:]:
        assert entry[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-5)


def test_64_streams_complete_and_free_their_resources(server: ServerProcess) -> None:
    with server.client() as http:
        before = http.get("/load").json()
        usage = metric(server, "kv_cache_usage_perc")

    async def all_streams() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            body = {**LONG, "max_tokens": 12, "stream": True}
            bodies = [{**body, "prompt": f"Story {i}"} for i in range(64)]
            return [r.text for r in await asyncio.gather(*(http.post("/v1/completions", json=b) for b in bodies))]

    for text in asyncio.run(all_streams()):
        *chunks, done = read_events(text)
        assert done == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    with server.client() as http:
        assert http.get("/load").json() == before == {"server_load": 0}
    eventually(lambda: metric(server, "num_requests_running") == 0)
    assert metric(server, "kv_cache_usage_perc") == pytest.approx(usage)


def test_disconnect_frees_the_batch_slot(server: ServerProcess) -> None:
    body = {**LONG, "stream": True, "n": 128}  # eight times what runs at once
    generated = metric(server, "generation_tokens_total")
    [engine] = server.engine_pids()
    try:
        with server.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            os.kill(engine, signal.SIGSTOP)  # so that the request cannot finish before the disconnect
            eventually(lambda: metric(server, "num_requests_running") > 0)
        eventually(lambda: httpx.get(server.url + "/load").json() == {"server_load": 0})
    finally:
        os.kill(engine, signal.SIGCONT)
    with server.client() as http:  # gauges are updated with the next step
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    eventually(lambda: metric(server, "num_requests_running") == 0)
    assert metric(server, "generation_tokens_total") - generated < body["n"] * body["max_tokens"]


def test_invalid_requests_do_not_affect_the_server(server: ServerProcess) -> None:
    wrong: list[dict[str, Any]] = [
        {"prompt": "x " * 2000},
        {"prompt": "x", "temperature": -1},
        {"prompt": []},
        {"prompt": "x", "model": "other"},
        {"prompt": [99999]},
        {"prompt": "x", "response_format": {"type": "json"}},
        {"prompt": "x", "n": 0},
    ]
    with server.client() as http:
        codes = [http.post("/v1/completions", json=body).status_code for body in wrong]
        assert codes == [400, 400, 400, 404, 400, 400, 400]
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert http.get("/health").status_code == 200


@pytest.mark.slow
def test_killed_engine_ends_streams_and_the_server(own_server: ServerProcess) -> None:
    [engine] = own_server.engine_pids()
    with own_server.client() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "n": 128, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"code":503' in rest[-2]
    assert "signal 9" in rest[-2]
    assert own_server.wait(30) == 1


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_lets_a_short_request_finish(own_server: ServerProcess, stream: bool) -> None:
    answers: list[httpx.Response] = []
    [engine] = own_server.engine_pids()
    os.kill(engine, signal.SIGSTOP)  # so that the request cannot finish before the signal
    body = {**LONG, "max_tokens": 60, "stream": stream}
    request = threading.Thread(target=lambda: answers.append(httpx.post(own_server.url + "/v1/completions", json=body, timeout=60)))
    request.start()
    eventually(lambda: httpx.get(own_server.url + "/load").json()["server_load"] == 1)
    own_server.process.send_signal(signal.SIGTERM)
    eventually(lambda: "Shutting down" in own_server.output)
    os.kill(engine, signal.SIGCONT)
    request.join(60)
    [answer] = answers
    choice = read_events(answer.text)[-2]["choices"][0] if stream else answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert own_server.wait(30) == 0


@pytest.mark.slow
def test_second_signal_cancels_running_requests(tiny_llama_dir: Path) -> None:
    server = ServerProcess(str(tiny_llama_dir), "--shutdown-timeout", "600", *OPTIONS, *SIZES)
    [engine] = server.engine_pids()
    body = {**LONG, "n": 128, "stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine, signal.SIGSTOP)  # so that the request cannot finish before the second signal
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "Shutting down" in server.output)
        server.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
        with suppress(ProcessLookupError):  # the engine may already have been ended
            os.kill(engine, signal.SIGCONT)
    assert '"finish_reason":"abort"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert server.wait(60) == 0


@pytest.mark.slow
def test_port_in_use_is_one_sentence_at_once(tiny_llama_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerProcess(str(tiny_llama_dir), "--port", str(port), "--enforce-eager", wait=False)
        assert server.wait(60) not in (0, None)
    assert f"Port {port} on 127.0.0.1 is in use" in " ".join(server.output.split())
    assert "Traceback" not in server.output

"""Tests over TCP: clients that disconnect, an engine that dies, OpenAI's SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.fake_engine import says
from tests.support.sse import read_events

OverTcp = Callable[[Server], Any]
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True}


async def endless(start_server: StartServer, tokenizer: Any, **settings: Any) -> Server:
    return await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005}, **settings)


async def test_disconnect_during_a_stream_aborts_its_sequences(start_server: StartServer, over_tcp: OverTcp, tokenizer: Any) -> None:
    server = await endless(start_server, tokenizer)
    url = await over_tcp(server)
    async with httpx.AsyncClient() as http:
        async with http.stream("POST", url + "/v1/chat/completions", json={**BODY, "stream": True, "n": 2}) as response:
            async for line in response.aiter_lines():
                if "Hello" in line or server.engine.steps > 5:
                    break
    disconnected_at = server.engine.steps
    await eventually(lambda: len(server.engine.aborted) == 2)
    assert server.engine.num_running == 0
    assert server.engine.steps - disconnected_at < 200  # about one second
    assert (await server.http.get("/load")).json() == {"server_load": 0}


async def test_disconnect_before_the_answer_aborts(start_server: StartServer, over_tcp: OverTcp, tokenizer: Any) -> None:
    server = await endless(start_server, tokenizer)
    url = await over_tcp(server)
    async with httpx.AsyncClient() as http:
        waiting = asyncio.create_task(http.post(url + "/v1/chat/completions", json=BODY))
        await eventually(lambda: server.engine.num_running == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await eventually(lambda: server.engine.num_running == 0)
    assert len(server.engine.aborted) == 1


async def test_disconnect_before_the_first_token_aborts(start_server: StartServer, over_tcp: OverTcp, tokenizer: Any) -> None:
    server = await endless(start_server, tokenizer)
    server.engine.hold.clear()
    url = await over_tcp(server)
    async with httpx.AsyncClient() as http:
        async with http.stream("POST", url + "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            assert response.status_code == 200
            await eventually(lambda: server.engine.num_running == 1)
    await eventually(lambda: server.engine.num_running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_death_ends_running_requests_and_refuses_new_ones(start_server: StartServer, tokenizer: Any, stream: bool) -> None:
    server = await endless(start_server, tokenizer)
    pending = asyncio.create_task(server.http.post("/v1/chat/completions", json={**BODY, "stream": stream}))
    await eventually(lambda: server.engine.steps > 3)
    server.engine.die("The engine process was ended by signal 9.")
    response = await asyncio.wait_for(pending, 5)
    if stream:
        *_, error, done = read_events(response.text)
        assert error["error"]["code"] == 503
        assert "signal 9" in error["error"]["message"]
        assert done == "[DONE]"
    else:
        assert response.status_code == 503
        assert "signal 9" in response.json()["error"]["message"]
    for refused in (await server.chat(), await server.complete(), await server.http.get("/health"), await server.http.get("/ready")):
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
    assert (await server.http.get("/ping")).status_code == 200
    assert server.deaths == ["The engine process was ended by signal 9."]


async def test_openai_sdk(start_server: StartServer, over_tcp: OverTcp) -> None:
    server = await start_server(api_keys=("secret",))
    url = await over_tcp(server)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="secret", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        answer = await client.chat.completions.create(model="test-model", messages=messages, max_tokens=100)
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage is not None
        stream = await client.chat.completions.create(
            model="test-model", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
        assert chunks[-1].usage is not None
        completion = await client.completions.create(model="test-model", prompt="Hi", max_tokens=100, logprobs=1)
        assert completion.choices[0].text == ANSWER
        assert [model.id async for model in client.models.list()] == ["test-model", "alias"]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="test-model", messages=messages, temperature=-3)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_error_in_a_stream_reaches_the_openai_sdk(start_server: StartServer, over_tcp: OverTcp) -> None:
    server = await start_server()
    server.engine.fail_requests = "The logits are not finite."
    url = await over_tcp(server)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="alias", prompt="Hi", stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            _ = [chunk async for chunk in stream]


async def test_64_concurrent_streams_have_equal_texts(start_server: StartServer, over_tcp: OverTcp, tokenizer: Any) -> None:
    server = await start_server(engine={"pause": 0.001})
    url = await over_tcp(server)
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=64)) as http:
        body = {**BODY, "ignore_eos": False, "stream": True}
        answers = await asyncio.gather(*(http.post(url + "/v1/chat/completions", json=body) for _ in range(64)))
    for answer in answers:
        *chunks, _ = read_events(answer.text)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == ANSWER
    assert (await server.http.get("/load")).json() == {"server_load": 0}

"""Fields that vLLM's clients send: log-probabilities of named tokens, the whole vocabulary, truncation, token ids, wide ranges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import ANSWER, Server, StartServer
from tests.support.sse import read_events


async def test_wide_temperature_and_repetition_penalty(server: Server) -> None:
    assert (await server.complete(temperature=7.5, repetition_penalty=3.5)).status_code == 200
    params = server.engine.requests[0].sampling_params
    assert (params.temperature, params.repetition_penalty) == (7.5, 3.5)
    for field in ("temperature", "repetition_penalty"):
        error = (await server.complete(**{field: 1e7})).json()["error"]
        assert (error["code"], error["param"]) == (400, field)


async def test_every_wrong_key_of_logit_bias_is_named(server: Server) -> None:
    error = (await server.complete(logit_bias={"a": 1, "3": "x", "4": 1, "-5": 2})).json()["error"]
    assert error["param"] == "logit_bias"
    assert all(wrong in error["message"] for wrong in ("'a': 1", "'3': 'x'", "'-5': 2"))
    error = (await server.complete(logit_bias={"5": 1, "9999": 1, "8888": 1})).json()["error"]
    assert "logit_bias has token ids 9999, 8888, but the model's ids are" in error["message"]
    error = (await server.complete(logit_bias={"5": 101, "6": 1, "7": -200})).json()["error"]
    assert "logit_bias[5], logit_bias[7] must be in [-100, 100], got 101.0, -200.0" in error["message"]


async def test_logprobs_of_the_vocabulary_are_behind_max_logprobs(server: Server) -> None:
    error = (await server.complete(logprobs=-1)).json()["error"]
    assert error["param"] == "logprobs"
    assert "in [0, 20] (--max-logprobs), got -1, the whole vocabulary" in error["message"]
    error = (await server.chat(logprobs=True, top_logprobs=-1)).json()["error"]
    assert error["param"] == "top_logprobs"


async def test_a_larger_max_logprobs(start_server: StartServer) -> None:
    server = await start_server(engine={"max_logprobs": -1})
    assert (await server.complete(logprobs=-1, prompt_logprobs=-1)).status_code == 200
    params = server.engine.requests[0].sampling_params
    assert (params.logprobs, params.prompt_logprobs) == (-1, -1)


async def test_logprob_token_ids(server: Server) -> None:
    answer = (await server.complete(logprobs=0, logprob_token_ids=[5, 6], max_tokens=1)).json()
    assert server.engine.requests[0].sampling_params.logprob_token_ids == [5, 6]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 1
    error = (await server.complete(logprob_token_ids=[5])).json()["error"]
    assert "logprob_token_ids must be given together with logprobs" in error["message"]
    error = (await server.complete(logprobs=1, logprob_token_ids=[9999, 5, 8888])).json()["error"]
    assert "logprob_token_ids has token ids 9999, 8888" in error["message"]
    error = (await server.complete(logprobs=1, logprob_token_ids=[5] * 129)).json()["error"]
    assert "at most 128 ids, got '129 ids'" in error["message"]


async def test_truncation_side(server: Server) -> None:
    ids = [4, 5, 6, 7, 8]
    await server.complete(prompt=ids, truncate_prompt_tokens=2)
    await server.complete(prompt=ids, truncate_prompt_tokens=2, truncation_side="left")
    await server.complete(prompt=ids, truncate_prompt_tokens=2, truncation_side="right")
    assert [request.prompt_token_ids for request in server.engine.requests] == [[7, 8], [7, 8], [4, 5]]
    long = "the quick brown fox " * 20_000  # cut before it is tokenized
    await server.http.post("/v1/completions", json={"prompt": long, "truncate_prompt_tokens": 3, "truncation_side": "right"})
    assert server.engine.requests[-1].prompt_token_ids == server.tokenizer.encode(long[:100])[:3]
    assert (await server.complete(truncation_side="top")).json()["error"]["param"] == "truncation_side"


@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_token_ids_are_complete(server: Server, echo: bool) -> None:
    """Also where a token has no text of its own: 🙂 is several tokens."""
    response = await server.complete(prompt="Hi 🙂", stream=True, return_token_ids=True, echo=echo)
    *chunks, _ = read_events(response.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = [*server.tokenizer.encode(ANSWER), server.tokenizer.eos_token_ids[0]]
    assert [token for choice in choices for token in choice["token_ids"]] == expected
    assert "".join(choice["text"] for choice in choices) == ("Hi 🙂" if echo else "") + ANSWER
    with_prompt = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert with_prompt == [server.tokenizer.encode("Hi 🙂")]
    whole = (await server.complete(prompt="Hi 🙂", return_token_ids=True, echo=echo)).json()["choices"][0]
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (expected, server.tokenizer.encode("Hi 🙂"))


@pytest.mark.parametrize("echo", [False, True])
async def test_chat_token_ids(server: Server, echo: bool) -> None:
    fields: dict[str, Any] = {"return_token_ids": True}
    if echo:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well 🙂"}]
        fields |= {"messages": messages, "echo": True, "continue_final_message": True}
    whole = (await server.chat(**fields)).json()
    *chunks, _ = read_events((await server.chat(stream=True, **fields)).text)
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or []]
    assert streamed == whole["choices"][0]["token_ids"]
    assert streamed == [*server.tokenizer.encode(ANSWER), server.tokenizer.eos_token_ids[0]]
    assert whole["prompt_token_ids"] == server.engine.requests[0].prompt_token_ids
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [whole["prompt_token_ids"]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"] == ("Well 🙂" if echo else "") + ANSWER


async def test_infinite_values_are_refused(server: Server) -> None:
    body = json.dumps({"prompt": "Hi", "repetition_penalty": 1e300}).replace("1e+300", "1e999")
    response = await server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400

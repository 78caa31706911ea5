"""`use_beam_search` on a scripted engine, whose tokens depend on the prompt so far."""

from __future__ import annotations

from typing import Any

import pytest

from compile_and_serve.runtime.beam_search import BeamSearch
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.serve.beam_search import _EXCLUDED
from tests.serve.conftest import Server, StartServer

VOCAB = 60


def first_token(ids: list[int]) -> int:
    return 10 + (7 * sum(ids) + len(ids)) % VOCAB


def script(request: EngineRequest) -> list[int]:
    return [first_token(request.prompt_token_ids)]


def expected(server: Server, prompt: list[int], width: int, max_tokens: int, **options: Any) -> list[list[int]]:
    search = BeamSearch(width=width, max_tokens=max_tokens, **{"end_ids": server.tokenizer.eos_token_ids, **options})
    while search.alive:
        entries = [server.engine.logprobs(first_token([*prompt, *b.token_ids]), 2 * width) for b in search.alive]
        search.advance(entries)
    return [list(beam.token_ids) for beam in search.results()]


async def test_completions(start_server: StartServer) -> None:
    server = await start_server(script=script)
    prompts = [server.tokenizer.encode("Hi"), server.tokenizer.encode("the quick")]
    answer = (
        await server.complete(prompt=prompts, n=3, use_beam_search=True, max_tokens=4, return_token_ids=True, echo=True, temperature=1.0)
    ).json()
    wanted = [tokens for prompt in prompts for tokens in expected(server, prompt, 3, 4)]
    assert [choice["token_ids"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [text + server.tokenizer.decode(tokens) for text, tokens in zip(["Hi"] * 3 + ["the quick"] * 3, wanted, strict=True)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 24
    assert {request.sampling_params.max_tokens for request in server.engine.requests} == {1}


async def test_chat_and_stop_tokens(start_server: StartServer) -> None:
    server = await start_server(script=script)
    options = {"n": 2, "use_beam_search": True, "max_tokens": 3, "return_token_ids": True, "length_penalty": 0.0}
    plain = (await server.chat(**options)).json()
    prompt = plain["prompt_token_ids"]
    wanted = expected(server, prompt, 2, 3, length_penalty=0.0)
    assert [choice["token_ids"] for choice in plain["choices"]] == wanted
    stop = wanted[0][1]
    stopped = (await server.chat(**options, stop_token_ids=[stop])).json()["choices"]
    ended = expected(server, prompt, 2, 3, length_penalty=0.0, end_ids=[*server.tokenizer.eos_token_ids, stop])
    assert [choice["token_ids"] for choice in stopped] == ended
    for choice, tokens in zip(stopped, ended, strict=True):
        is_stopped = tokens[-1] == stop
        assert choice["finish_reason"] == ("stop" if is_stopped else "length")
        assert choice["stop_reason"] == (stop if is_stopped else None)
        shown = tokens[:-1] if is_stopped else tokens
        assert choice["message"]["content"] == server.tokenizer.decode(shown)
    assert any(tokens[-1] == stop for tokens in ended)


EXAMPLES = {
    "stop": ["x"], "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 2, "logit_bias": {"5": 1},
    "allowed_token_ids": [5], "bad_words": ["x"], "min_tokens": 1, "logprobs": 1, "prompt_logprobs": 1,
    "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"},
}  # fmt: skip


@pytest.mark.parametrize("field", [*_EXCLUDED, "stream"])
async def test_what_cannot_be_combined(server: Server, field: str) -> None:
    value = EXAMPLES.get(field, True)
    error = (await server.complete(use_beam_search=True, **{field: value})).json()["error"]
    assert (error["param"], error["code"]) == (field, 400)
    assert server.engine.requests == []


async def test_values_without_effect_and_wrong_widths(server: Server) -> None:
    harmless = {"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "stop": [], "min_tokens": 0}
    assert (await server.complete(use_beam_search=True, max_tokens=1, **harmless)).status_code == 200
    error = (await server.complete(length_penalty=2.0)).json()["error"]
    assert error["param"] == "length_penalty"
    error = (await server.chat(use_beam_search=True, n=129)).json()["error"]
    assert error["param"] == "n"


async def test_a_failure_of_the_engine(server: Server) -> None:
    server.engine.fail_requests = "It broke."
    answer = await server.complete(use_beam_search=True, n=2)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "It broke.")

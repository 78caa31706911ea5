"""`/v1/completions` on a scripted engine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest

from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.protocol.logprobs import LogprobsWriter
from tests.serve.conftest import ANSWER, Server, StartServer
from tests.support.sse import read_events


async def test_answer_has_openai_shape(server: Server) -> None:
    answer = (await server.complete()).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (ANSWER, "stop", None)
    assert answer["usage"]["prompt_tokens"] == len(server.tokenizer.encode("Hi"))


async def test_max_tokens_is_16_by_default(server: Server) -> None:
    await server.http.post("/v1/completions", json={"prompt": "Hi"})
    assert server.engine.requests[0].sampling_params.max_tokens == 16


@pytest.mark.parametrize(
    "prompt,expected", [("Hi", [[44, 77]]), ([44, 77], [[44, 77]]), (["Hi", "H"], [[44, 77], [44]]), ([[44, 77], [3]], [[44, 77], [3]])]
)
async def test_every_form_of_a_prompt(server: Server, prompt: Any, expected: list[list[int]]) -> None:
    if isinstance(prompt, str) or isinstance(prompt[0], str):
        texts = [prompt] if isinstance(prompt, str) else prompt
        expected = [server.tokenizer.encode(text) for text in texts]
    answer = (await server.complete(prompt=prompt)).json()
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(len(ids) for ids in expected)


async def test_indices_count_prompts_and_completions(server: Server) -> None:
    answer = (await server.complete(prompt=["A", "B"], n=2, echo=True)).json()
    assert [choice["text"][0] for choice in answer["choices"]] == ["A", "A", "B", "B"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_stream_gives_the_same_text(server: Server) -> None:
    response = await server.complete(stream=True, echo=True, stream_options={"include_usage": True})
    *chunks, usage, done = read_events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hi" + ANSWER
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["prompt_tokens"] == len(server.tokenizer.encode("Hi"))


async def test_logprobs_cover_prompt_and_completion_with_echo(server: Server) -> None:
    answer = (await server.complete(echo=True, logprobs=1)).json()
    [choice] = answer["choices"]
    shown = choice["logprobs"]
    assert shown["tokens"][:2] == [server.tokenizer.token_text(i) for i in server.tokenizer.encode("Hi")]
    assert len(shown["tokens"]) == answer["usage"]["total_tokens"]
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    assert shown["token_logprobs"][1:] == [-0.5] * (len(shown["tokens"]) - 1)
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|end|>")):
            assert choice["text"].startswith(token, offset)
    assert shown["text_offset"][-1] == len(choice["text"])


async def test_parts_of_a_character_have_distinct_names(start_server: StartServer, tokenizer: Tokenizer) -> None:
    parts = tokenizer.encode("🙂")
    assert len(parts) > 1
    server = await start_server(script=lambda request: parts)
    shown = (await server.complete(logprobs=3, max_tokens=2 * len(parts))).json()["choices"][0]["logprobs"]
    raw = [tokenizer.token_bytes(token) for token in parts] * 2
    assert shown["tokens"] == ["bytes:" + "".join(f"\\x{byte:02x}" for byte in part) for part in raw]
    assert shown["text_offset"] == [0] + [1] * len(parts) + [2] * (len(parts) - 1)
    for name, likeliest in zip(shown["tokens"], shown["top_logprobs"], strict=True):
        assert list(likeliest.values()) == [-0.5, -1.5, -2.5]
        assert likeliest[name] == -0.5


def test_of_two_tokens_with_equal_names_the_more_likely_is_kept(tokenizer: Tokenizer) -> None:
    writer = LogprobsWriter(tokenizer, as_ids=False)
    beyond = tokenizer.vocab_size  # ids without a token all have the empty name
    entry = TokenLogprobs([5, beyond, beyond + 1, 6], [-9.0, -1.0, -2.0, -3.0], 7)
    [likeliest] = writer.completion([5], [entry], offset=0)["top_logprobs"]
    assert likeliest == {"": -1.0, tokenizer.token_text(6): -3.0, tokenizer.token_text(5): -9.0}


@pytest.mark.parametrize("as_ids", [False, True])
async def test_what_is_written_in_parts_is_the_whole(tokenizer: Tokenizer, as_ids: bool) -> None:
    """Log-probabilities of a long prompt; the event loop has its turns meanwhile."""
    writer, turns = LogprobsWriter(tokenizer, as_ids=as_ids), 0
    ids = [(7 * place) % (tokenizer.vocab_size + 3) for place in range(500)]
    entries = [None, *(TokenLogprobs([token, token + 1, token], [-1e-7 * token, -3.5, -math.inf], 1 + token) for token in ids[1:])]

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert bytes(await writer.prompt_json(entries)) == msgspec.json.encode(writer.prompt(entries))
    assert turns >= 5
    assert await writer.echoed(ids, entries) == writer.completion(ids, entries, offset=0)
    assert turns >= 10
    counting.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_of_the_prompt_alone(server: Server, stream: bool) -> None:
    response = await server.complete(echo=True, logprobs=0, max_tokens=0, stream=stream)
    if stream:
        chunk, done = read_events(response.text)
        choice = chunk["choices"][0]
        assert done == "[DONE]"
    else:
        choice = response.json()["choices"][0]
        assert response.json()["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert len(choice["logprobs"]["tokens"]) == len(server.tokenizer.encode("Hi"))


async def test_streamed_logprobs_equal_unstreamed_ones(server: Server) -> None:
    fields = {"logprobs": 2, "echo": True}
    whole = (await server.complete(**fields)).json()["choices"][0]["logprobs"]
    *chunks, _ = read_events((await server.complete(**fields, stream=True)).text)
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][name]] == whole[name]


async def test_logprobs_end_at_the_stop_string(server: Server) -> None:
    answer = (await server.complete(logprobs=0, stop=" there")).json()
    [choice] = answer["choices"]
    assert choice["text"] == "Hello"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    assert "".join(choice["logprobs"]["tokens"]).startswith("Hello there")


async def test_tokens_as_token_ids(server: Server) -> None:
    choice = (await server.complete(logprobs=0, return_tokens_as_token_ids=True)).json()["choices"][0]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{server.tokenizer.encode(ANSWER)[0]}"


async def test_token_ids_are_returned_on_request(server: Server) -> None:
    choice = (await server.complete(return_token_ids=True)).json()["choices"][0]
    assert choice["prompt_token_ids"] == server.tokenizer.encode("Hi")
    assert choice["token_ids"] == [*server.tokenizer.encode(ANSWER), server.tokenizer.eos_token_ids[0]]
    first, *rest, _ = read_events((await server.complete(return_token_ids=True, stream=True)).text)
    assert first["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    assert [i for chunk in [first, *rest] for i in chunk["choices"][0]["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize("keep,length", [(3, 3), (-1, 156)])
async def test_truncated_prompt_keeps_its_end(server: Server, keep: int, length: int) -> None:
    prompt = [5] * 290 + [6, 7, 8]
    assert (await server.complete(prompt=prompt, truncate_prompt_tokens=keep)).status_code == 200
    assert server.engine.requests[0].prompt_token_ids == prompt[-length:]


async def test_prompt_logprobs_without_echo(server: Server) -> None:
    choice = (await server.complete(prompt_logprobs=0)).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(server.tokenizer.encode("Hi"))
    assert choice["text"] == ANSWER

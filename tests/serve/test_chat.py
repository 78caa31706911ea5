"""`/v1/chat/completions` on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compile_and_serve.serve.protocol.chunks import ChunkWriter
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.fake_engine import says
from tests.support.sse import read_events


async def test_answer_has_openai_shape(server: Server) -> None:
    response = await server.chat()
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "test-model"
    assert answer["system_fingerprint"].startswith("cas-")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == ANSWER
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    num_new = len(server.tokenizer.encode(ANSWER)) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": None,
    }


async def test_prompt_is_the_rendered_template(server: Server) -> None:
    await server.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}])
    prompt = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|start|>user\nA\nB<|end|>\n<|start|>assistant\n"


async def test_stream_has_role_first_usage_last_and_the_same_text(server: Server) -> None:
    response = await server.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = read_events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == ANSWER
    assert not any("\ufffd" in chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(server.tokenizer.encode(ANSWER)) + 1


async def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = read_events((await server.chat(stream=True, stream_options=options)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == len(server.tokenizer.encode(ANSWER)) + 1


async def test_stream_without_options_has_no_usage(server: Server) -> None:
    *chunks, _ = read_events((await server.chat(stream=True)).text)
    assert all("usage" not in chunk for chunk in chunks)


async def test_n_completions_have_distinct_indices_and_seeds(server: Server) -> None:
    answer = (await server.chat(n=3, seed=7, temperature=1)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 3
    assert sorted(r.sampling_params.seed for r in server.engine.requests) == [7, 8, 9]
    assert len({r.request_id for r in server.engine.requests}) == 3
    assert all(r.sampling_params.n == 1 for r in server.engine.requests)


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_cached_tokens_are_hidden_by_default(server: Server, path: str) -> None:
    """They tell whether somebody else sent the same prefix."""
    send = getattr(server, path)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = read_events((await send(stream=True, stream_options=options)).text)
    answers = [(await send(n=2)).json(), *chunks]
    assert [answer["usage"]["prompt_tokens_details"] for answer in answers] == [None] * len(answers)
    assert "cached_tokens" not in str(answers)


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_several_api_keys_do_not_share_cached_prefixes(start_server: StartServer, path: str) -> None:
    server = await start_server(api_keys=("one", "two"))
    salts = []
    for key, salt in (("one", None), ("one", None), ("two", None), ("one", "s"), ("two", "s")):
        server.http.headers["Authorization"] = f"Bearer {key}"
        assert (await getattr(server, path)(cache_salt=salt)).status_code == 200
        salts.append(server.engine.requests[-1].cache_salt)
    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert None not in salts
    assert "one" not in str(salts)
    single = await start_server(api_keys=("one",))
    single.http.headers["Authorization"] = "Bearer one"
    await getattr(single, path)(cache_salt="s")
    await getattr(single, path)()
    assert [request.cache_salt for request in single.engine.requests] == ["s", None]


async def test_cached_tokens_of_the_shared_prompt_count_once(start_server: StartServer) -> None:
    server = await start_server(prompt_tokens_details=True)
    usage = (await server.chat(n=3)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] // 2}
    *_, last, _ = read_events((await server.chat(n=3, stream=True, stream_options={"include_usage": True})).text)
    assert last["usage"]["prompt_tokens_details"] == usage["prompt_tokens_details"]


async def test_cached_tokens_of_several_prompts_are_added(start_server: StartServer) -> None:
    server = await start_server(prompt_tokens_details=True)
    prompts = [[5] * 4, [6] * 10, [7] * 20]  # half of each is cached
    for n in (1, 3):
        usage = (await server.complete(prompt=prompts, n=n)).json()["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (34, {"cached_tokens": 17})
        stream = await server.complete(prompt=prompts, n=n, stream=True, stream_options={"include_usage": True})
        *_, last, _ = read_events(stream.text)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 17}


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_a_response_writer_that_fails_aborts_the_generation(
    start_server: StartServer, tokenizer: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.001})
    chunk, written = ChunkWriter.chunk, 0

    def fail_later(self: ChunkWriter, *args: Any, **options: Any) -> bytes:
        nonlocal written
        written += 1
        if written > 5:
            raise RuntimeError("the writer failed")
        return chunk(self, *args, **options)

    monkeypatch.setattr(ChunkWriter, "chunk", fail_later)
    response = await getattr(server, path)(n=2, stream=True, ignore_eos=True)
    assert "[DONE]" not in response.text
    await eventually(lambda: server.engine.num_running == 0)
    assert len(server.engine.aborted) == 2
    assert server.app.state.context.engine.num_in_flight == 0


async def test_n_completions_stream_by_index(server: Server) -> None:
    *chunks, _ = read_events((await server.chat(n=2, stream=True)).text)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == {0: ANSWER, 1: ANSWER}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_the_text_and_aborts_the_engine(server: Server, stream: bool, include: bool) -> None:
    response = await server.chat(stop=["wör", "never"], include_stop_str_in_output=include, stream=stream)
    expected = "Hello there, 🙂 wör" if include else "Hello there, 🙂 "
    if stream:
        *chunks, _ = read_events(response.text)
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        final = chunks[-1]["choices"][0]
    else:
        final = response.json()["choices"][0]
        text = final["message"]["content"]
    assert text == expected
    assert (final["finish_reason"], final["stop_reason"]) == ("stop", "wör")
    assert server.engine.aborted == [server.engine.requests[0].request_id]
    assert server.engine.num_running == 0


async def test_stop_token_id_is_the_reason_and_not_in_the_text(server: Server) -> None:
    token = server.tokenizer.encode("!")[0]
    choice = (await server.chat(stop_token_ids=[token])).json()["choices"][0]
    assert choice["message"]["content"] == ANSWER.removesuffix("!")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


async def test_length_is_the_finish_reason_at_max_tokens(server: Server) -> None:
    answer = (await server.chat(max_completion_tokens=2, max_tokens=50)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


async def test_without_max_tokens_the_models_limit_applies(server: Server) -> None:
    await server.chat(max_tokens=None)
    request = server.engine.requests[0]
    assert request.sampling_params.max_tokens == 256 - len(request.prompt_token_ids)


async def test_logprobs_contain_every_token_and_its_bytes(server: Server) -> None:
    answer = (await server.chat(logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    raw = bytes(byte for entry in content for byte in entry["bytes"])
    assert raw.decode() == ANSWER + "<|end|>"
    assert content[0]["logprob"] == -0.5


async def test_streamed_logprobs_equal_unstreamed_ones(server: Server) -> None:
    whole = (await server.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = read_events((await server.chat(logprobs=True, top_logprobs=1, stream=True)).text)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == whole


async def test_token_ids_are_returned_on_request(server: Server) -> None:
    answer = (await server.chat(return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == server.engine.requests[0].prompt_token_ids
    assert answer["choices"][0]["token_ids"] == [*server.tokenizer.encode(ANSWER), server.tokenizer.eos_token_ids[0]]
    first, *chunks, _ = read_events((await server.chat(return_token_ids=True, stream=True)).text)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    streamed = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert streamed == answer["choices"][0]["token_ids"]


async def test_prompt_logprobs_are_keyed_by_token_id(server: Server) -> None:
    answer = (await server.chat(prompt_logprobs=1)).json()
    prompt = server.engine.requests[0].prompt_token_ids
    entries = answer["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(prompt)
    assert all(str(token) in entry for token, entry in zip(prompt[1:], entries[1:], strict=True))
    assert entries[1][str(prompt[1])]["rank"] == 1


async def test_continue_final_message_keeps_it_open_and_echo_repeats_it(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    response = await server.chat(messages=messages, continue_final_message=True, echo=True)
    prompt = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|start|>assistant\nWell, ")
    assert response.json()["choices"][0]["message"]["content"] == "Well, " + ANSWER
    *chunks, _ = read_events((await server.chat(messages=messages, continue_final_message=True, echo=True, stream=True)).text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Well, " + ANSWER


async def test_request_fields_reach_the_engine(start_server: StartServer) -> None:
    server = await start_server(priorities=True)
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "min_tokens": 3, "logit_bias": {"5": -1.5}, "allowed_token_ids": [5, 6],
        "bad_words": ["fox"], "ignore_eos": True, "priority": -3, "cache_salt": "tenant", "request_id": "mine",
    }  # fmt: skip
    assert (await server.chat(**fields)).json()["id"] == "chatcmpl-mine"
    request = server.engine.requests[0]
    params = request.sampling_params
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "allowed_token_ids"):
        assert getattr(params, name) == fields[name]
    assert params.logit_bias == {5: -1.5}
    assert server.tokenizer.encode("fox") in params.bad_words_token_ids
    assert (request.priority, request.cache_salt, request.stop_token_ids) == (-3, "tenant", [])
    assert request.eos_token_ids == server.tokenizer.eos_token_ids


async def test_ignored_end_token_is_followed_by_more(server: Server) -> None:
    answer = (await server.chat(ignore_eos=True, max_tokens=60, skip_special_tokens=False)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "<|end|>" in answer["choices"][0]["message"]["content"]


async def test_requests_override_the_models_default_sampling(start_server: StartServer) -> None:
    server = await start_server(default_sampling={"temperature": 0.25, "top_k": 9})
    await server.chat()
    await server.chat(temperature=1.5)
    first, second = (request.sampling_params for request in server.engine.requests)
    assert (first.temperature, first.top_k) == (0.25, 9)
    assert (second.temperature, second.top_k) == (1.5, 9)


async def test_half_a_character_is_never_streamed(start_server: StartServer, server: Server) -> None:
    tokens = server.tokenizer.encode("🙂")
    assert len(tokens) > 1
    broken = await start_server(script=lambda request: tokens)
    response = await broken.chat(stream=True, max_tokens=2 * len(tokens) + 1)
    *chunks, _ = read_events(response.text)
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert texts == ["", "🙂", "🙂", "\ufffd"]


async def test_two_requests_with_one_id_do_not_disturb_each_other(start_server: StartServer, server: Server) -> None:
    twin = await start_server(script=says(server.tokenizer, ANSWER), engine={"pause": 0.001})
    answers = await asyncio.gather(*(twin.chat(request_id="same") for _ in range(4)))
    assert [a.json()["choices"][0]["message"]["content"] for a in answers] == [ANSWER] * 4

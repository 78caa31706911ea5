"""Every invalid request is answered in OpenAI's error shape and affects no other request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from compile_and_serve.runtime.messages import ErrorKind
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.sse import read_events
from tests.support.tokenizers import byte_level_tokenizer


def assert_error(response: Any, status: int, *, param: str | None = None, says: str = "") -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["type"].endswith("error")
    assert body["error"]["param"] == param
    message = body["error"]["message"]
    assert says in message
    assert message
    assert "Traceback" not in message
    assert ".py" not in message
    return message


OUT_OF_RANGE = [
    ("temperature", 1e400), ("temperature", -0.1), ("top_p", 0), ("top_p", 1.5), ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5), ("n", 0), ("n", 1000), ("max_tokens", -1), ("top_k", -2), ("min_p", 2),
    ("stop", ["x"] * 17), ("stop", [""]), ("stop", [1]), ("stop", {"a": 1}), ("repetition_penalty", 0), ("repetition_penalty", 1e-44),
    ("logit_bias", {"100000": 1}), ("logit_bias", {"x": 1}), ("logit_bias", {"5": 1000}), ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**12]), ("allowed_token_ids", []), ("allowed_token_ids", [99999]), ("bad_words", [""]),
    ("bad_words", ["ab"] * 1025), ("bad_words", ["x" * 100_000]),
    ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", 9999),
    ("seed", 2**63), ("seed", "x"), ("min_tokens", -1), ("min_tokens", 101), ("temperature", "hot"),
    ("temperature", []), ("stream", "perhaps"), ("priority", 2**40), ("cache_salt", ""), ("request_id", "x" * 257),
    ("top_k", 10**30), ("messages", []), ("messages", "Hi"), ("messages", [{"content": "no role"}]),
    ("messages", [{"role": 5, "content": "x"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": "lone \ud800 surrogate"}]), ("messages", ["Hi"]), ("messages", None),
    ("messages", [{"role": "wizard", "content": "x"}]), ("stop", "\ud800"), ("stop", ["a\udfff"]),
    ("top_logprobs", 3), ("stream_options", {"include_usage": True}), ("chat_template_kwargs", {"messages": []}),
    ("add_generation_prompt", "x"),
]  # fmt: skip


@pytest.mark.parametrize("field,value", OUT_OF_RANGE, ids=lambda v: str(v)[:30].encode("ascii", "replace").decode())
async def test_invalid_value_is_a_400(server: Server, field: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, field: value}
    response = await server.http.post("/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == 400
    assert len(error["message"]) < 700
    assert server.engine.requests == []


async def test_logprobs_beyond_20_are_a_400(server: Server) -> None:
    message = assert_error(await server.chat(logprobs=True, top_logprobs=30), 400, param="top_logprobs")
    assert message == "top_logprobs must be in [0, 20] (--max-logprobs), got 30."
    message = assert_error(await server.complete(logprobs=21), 400, param="logprobs")
    assert message == "logprobs must be in [0, 20] (--max-logprobs), got 21."


async def test_error_names_the_field_that_the_request_used(server: Server) -> None:
    says = "max_completion_tokens must be at least 0"
    assert_error(await server.chat(max_completion_tokens=-1), 400, param="max_completion_tokens", says=says)
    assert_error(await server.chat(max_tokens=-1), 400, param="max_tokens", says="max_tokens must be at least 0")
    long = [{"role": "user", "content": "word " * 400}]
    assert_error(await server.chat(messages=long), 400, param="messages", says="100 tokens of completion")
    assert_error(await server.chat(messages=[{"role": "user", "content": "x" * 100_000}]), 400, param="messages")


async def test_nan_is_a_400(server: Server) -> None:
    body = '{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}'
    response = await server.http.post("/v1/chat/completions", content=body)
    assert_error(response, 400, says="not valid JSON")


REFUSED = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "early_stopping": True,
    "best_of": 2,
    "chat_template": "{{ 1 }}",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "length_penalty": 2.0,
    "logits_processors": ["x"],
}


@pytest.mark.parametrize("field", REFUSED)
async def test_field_that_cannot_be_honoured_is_refused(server: Server, field: str) -> None:
    assert_error(await server.chat(**{field: REFUSED[field]}), 400, param=field)
    assert server.engine.requests == []


async def test_priority_without_its_policy_is_refused(server: Server) -> None:
    for answer in (await server.chat(priority=1), await server.complete(priority=-1)):
        assert_error(answer, 400, param="priority", says="--scheduling-policy priority")
    assert (await server.chat(priority=0)).status_code == 200


async def test_suffix_is_refused(server: Server) -> None:
    assert_error(await server.complete(suffix="end"), 400, param="suffix")


async def test_harmless_values_of_refused_fields_are_accepted(server: Server) -> None:
    fields = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "best_of": 1,
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "modalities": ["text"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "include_reasoning": True,
        "structured_outputs": None,
    }
    assert (await server.chat(**fields)).status_code == 200


async def test_unknown_field_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert (await server.chat(some_new_field=1)).status_code == 200
    assert [r.message for r in caplog.records].count("Requests contain the unknown field 'some_new_field', which has no effect.") == 1


async def test_unknown_field_cannot_forge_a_log_line(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    assert (await server.chat(**{"x\nError: forged \x1b[31m\u2028": 1})).status_code == 200
    [message] = [r.message for r in caplog.records if "forged" in r.message]
    assert message.isprintable()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null", b"a=b"])
async def test_malformed_body_is_a_400(server: Server, path: str, content: bytes) -> None:
    response = await server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == 400
    assert len(response.text) < 1000


@pytest.mark.parametrize(
    "content,says",
    [
        (b'{"prompt": ' + b"[" * 100_000, "The body's JSON is nested too deeply."),
        (b'{"prompt": ' + b"[" * 10_000, "The body's JSON is nested too deeply."),
        (b'{"seed": ' + b"1" * 5000 + b"}", "The body is not accepted: Integer value out of range - at `$[...]`."),
        (b'{"prompt": "\xff"}', "The body is not valid UTF-8."),
        (b'{"prompt": "\\ud800"}', "The body contains a lone surrogate, which is not a valid Unicode character."),
        (b"[" + b" " * 100_000 + b"]", "The body is not accepted: Expected `object`, got `array`."),
    ],
    ids=["nested", "nested, small", "digits", "utf-8", "surrogate", "large array"],
)
async def test_parser_errors_are_sentences(server: Server, content: bytes, says: str) -> None:
    assert assert_error(await server.http.post("/v1/completions", content=content), 400) == says


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json", "x"]
)
async def test_other_content_types_are_a_415(server: Server, path: str, content_type: str) -> None:
    """A web page of another origin may send these without a CORS preflight."""
    body = b'{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "tokens": [5]}'
    response = await server.http.post(path, content=body, headers={"Content-Type": content_type})
    assert_error(response, 415, says="must be 'application/json'")
    assert server.engine.requests == []


async def test_missing_content_type_is_accepted_except_from_browsers(server: Server) -> None:
    body = b'{"prompt": "Hi"}'
    assert (await server.http.post("/v1/completions", content=body)).status_code == 200
    response = await server.http.post("/v1/completions", content=body, headers={"Origin": "https://evil.example"})
    assert_error(response, 415, says="got none")
    for content_type in ("application/json", "Application/JSON; charset=utf-8"):
        headers = {"Content-Type": content_type, "Origin": "https://page.example"}
        assert (await server.http.post("/v1/completions", content=body, headers=headers)).status_code == 200


async def test_body_size_is_bounded(start_server: StartServer) -> None:
    server = await start_server(max_body_bytes=1000)
    assert_error(await server.complete(prompt="x" * 2000), 413, says="1000 bytes")

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    response = await server.http.post("/v1/completions", content=chunks())
    assert_error(response, 413, says="1000 bytes")
    assert response.headers["connection"] == "close"
    assert (await server.complete()).status_code == 200


async def test_repeated_input_is_shortened(server: Server) -> None:
    message = assert_error(await server.chat(temperature="x" * 5000), 400, param="temperature")
    assert message.count("x") <= 220
    message = assert_error(await server.chat(model="m" * 5000), 404, param="model")
    assert message.count("m") <= 220
    message = assert_error(await server.http.get("/nothing/" + "y" * 5000), 404)
    assert message.count("y") <= 220


async def test_unknown_model_route_and_method(server: Server) -> None:
    assert_error(await server.chat(model="other"), 404, param="model", says="'other'")
    assert_error(await server.http.get("/v1/models/other"), 404, param="model")
    assert_error(await server.http.get("/v1/nothing"), 404)
    assert_error(await server.http.get("/v1/chat/completions"), 405)


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompt_names_all_three_lengths_before_a_stream_opens(server: Server, stream: bool) -> None:
    response = await server.complete(prompt=[5] * 200, max_tokens=100, stream=stream)
    message = assert_error(response, 400, param="prompt")
    assert "256" in message
    assert "200 tokens" in message
    assert "100 tokens" in message
    for fields, says in (({"prompt": [5] * 256, "max_tokens": None}, "256"), ({"prompt": "word " * 100_000}, "at least")):
        assert_error(await server.complete(**fields, stream=stream), 400, param="prompt", says=says)
    assert server.engine.requests == []


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], {}, 5, None, [1.5], [True], [["a"]], ["a", 5], [-1], [10**6]])
async def test_malformed_prompt_is_a_400(server: Server, prompt: Any) -> None:
    response = await server.complete(prompt=prompt)
    assert response.status_code == 400, response.text
    assert server.engine.requests == []


async def test_number_of_completions_is_bounded(server: Server) -> None:
    assert_error(await server.complete(prompt=["x"] * 100, n=64), 400, param="prompt", says="4096")


async def test_missing_field_is_named(server: Server) -> None:
    assert_error(await server.http.post("/v1/completions", json={}), 400, param="prompt", says="missing")


async def test_model_without_template_says_so(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=byte_level_tokenizer([ANSWER], template=None))
    assert_error(await server.chat(), 400, param="messages", says="no chat template")


async def test_engine_without_tokenizer_accepts_only_ids(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=None)
    for response in (await server.chat(), await server.complete(), await server.complete(prompt=[5], stop="x")):
        assert_error(response, 400, says="without a tokenizer")
    answer = await server.complete(prompt=[5], max_tokens=3, return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"] == server.tokenizer.encode(ANSWER)[:3]


@pytest.mark.parametrize("kind,status", [("invalid", 400), ("overloaded", 503), ("internal", 500)])
async def test_engine_error_has_its_kinds_status_and_is_an_event_in_a_stream(server: Server, kind: ErrorKind, status: int) -> None:
    server.engine.fail_requests, server.engine.fail_kind = "The engine says why.", kind
    response = await server.chat()
    assert_error(response, status, says="The engine says why.")
    assert ("retry-after" in response.headers) == (status == 503)
    role, error, done = read_events((await server.chat(stream=True)).text)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert error["error"]["code"] == status
    assert done == "[DONE]"
    server.engine.fail_requests = None
    assert (await server.chat()).status_code == 200


async def test_full_queue_is_a_503_with_retry_after(start_server: StartServer) -> None:
    server = await start_server(engine={"max_in_flight": 2})
    server.engine.hold.clear()
    first = asyncio.create_task(server.chat())
    await eventually(lambda: server.engine.num_running == 1)
    response = await server.chat(n=2)
    assert_error(response, 503)
    assert int(response.headers["retry-after"]) >= 1
    server.engine.hold.set()
    assert (await first).status_code == 200
    assert (await server.chat(n=2)).status_code == 200


@pytest.mark.parametrize("fields,param", [({"n": 3}, "n"), ({"prompt": ["a", "b", "c"]}, "prompt")])
async def test_more_sequences_than_are_ever_accepted_are_a_400(start_server: StartServer, fields: dict[str, Any], param: str) -> None:
    server = await start_server(engine={"max_in_flight": 2})
    assert_error(await server.complete(**fields), 400, param=param, says="accepts 2 at once")


@pytest.mark.parametrize("size", [100, 200_000])
async def test_errors_of_large_bodies_name_their_field(server: Server, size: int) -> None:
    """Large bodies are validated in a thread."""
    text = "x" * size
    for fields, param in (
        ({"temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": text}, {"role": 5, "content": 7}]}, "messages"),
        ({"messages": None}, "messages"),
    ):
        answer = await server.chat(**({"messages": [{"role": "user", "content": text}], "user": text} | fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(param), answer.text
    answer = await server.http.post("/v1/chat/completions", json={"user": text})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "The field messages is missing.")

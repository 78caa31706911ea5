"""Bodies of the Responses API on the chat route, items that a client refers to, and calls that are cut off, on a scripted engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from compile_and_serve.serve.protocol import client_parts
from tests.serve.conftest import ANSWER, Server, StartServer
from tests.serve.test_agents import FLAT, USER
from tests.serve.test_responses import send as respond
from tests.serve.test_tool_calls import CALL, TOOL, prompt_of, started
from tests.support.sse import read_events

# Cursor's bodies on the chat route


CURSOR: dict[str, Any] = {
    "model": "test-model",
    "input": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
    ],
    "instructions": "Be kind.",
    "tools": [FLAT, {"type": "custom", "name": "patch"}, {"type": "web_search"}],
    "tool_choice": "auto",
    "max_output_tokens": 200,
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_retention": "24h",
    "user": "x",
}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_bodies_of_responses_are_answered_as_chats(start_server: StartServer, stream: bool, is_large: bool) -> None:
    server = await started(start_server, CALL)
    extra = {"stream_options": {"include_usage": True}} if stream else {}
    padding = {"unknown": "x" * 70_000} if is_large else {}  # large bodies are decoded field by field
    response = await server.http.post("/v1/chat/completions", json={**CURSOR, "stream": stream, **extra, **padding})
    assert response.status_code == 200, response.text
    if stream:
        *chunks, done = read_events(response.text)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        names = [call["function"].get("name") for delta in deltas for call in delta.get("tool_calls", [])]
        assert names[0] == "get_weather"
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    else:
        [call] = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert response.json()["object"] == "chat.completion"
    assert server.engine.requests[-1].sampling_params.max_tokens == 200
    cursors = prompt_of(server)
    body = {name: value for name, value in CURSOR.items() if name != "text"}
    assert (await server.http.post("/v1/responses", json=body)).status_code == 200
    assert prompt_of(server) == cursors


async def test_fields_of_chat_hold_for_bodies_of_responses(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER)
    fields = {"n": 2, "max_tokens": 7, "temperature": 0.5, "logprobs": True, "seed": 3}
    choices = (await server.http.post("/v1/chat/completions", json={"input": "Hi", **fields})).json()["choices"]
    assert [choice["logprobs"] is not None for choice in choices] == [True, True]
    params = server.engine.requests[-1].sampling_params
    assert (params.max_tokens, params.temperature) == (7, 0.5)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "missing"),
        ({"messages": None, "input": None}, "messages", ""),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", ""),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", ""),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "refers to the item 'x'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "only reads text"),
    ],
)
async def test_wrong_bodies_of_responses_are_a_400_on_the_chat_route(server: Server, body: dict[str, Any], param: str, says: str) -> None:
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param), error
    assert says in error["message"]


async def test_messages_come_before_input(server: Server) -> None:
    assert (await server.chat(input="ignored")).status_code == 200
    assert "ignored" not in prompt_of(server)


async def test_web_search_is_left_out_with_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_parts, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for options in ({}, {"search_context_size": "low", "user_location": None}):
            assert (await server.chat(web_search_options=options)).status_code == 200
    assert [r.message for r in caplog.records if "web_search_options" in r.message] == [
        "Requests contain web_search_options, which has no effect: this server does not search the web."
    ]


# Items that a client refers to, as Vercel's AI SDK does


async def test_stored_items_are_found_by_their_ids(start_server: StartServer) -> None:
    server = await started(start_server, f"<think>I look.</think>Well.{CALL}", response_store_bytes=1 << 20, reasoning_parser="qwen3")
    first = (await respond(server, input=[USER], tools=[FLAT])).json()
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}
    whole = [USER, *first["output"], output]
    references: list[dict[str, Any]] = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    for given in ([USER, *references, output], [USER, *({"id": one["id"]} for one in references), output]):
        assert (await respond(server, input=whole, tools=[FLAT], store=False)).status_code == 200
        expected = prompt_of(server)
        answer = await respond(server, input=given, tools=[FLAT])
        assert answer.status_code == 200, answer.text
        assert prompt_of(server) == expected
    # Items of the input are found, too, through the newest response that has them.
    listed = (await server.http.get(f"/v1/responses/{answer.json()['id']}/input_items", params={"order": "asc"})).json()["data"]
    assert [item["type"] for item in listed] == ["message", *kinds, "function_call_output"]
    assert (await server.http.delete(f"/v1/responses/{first['id']}")).status_code == 200
    assert (await respond(server, input=[{"type": "item_reference", "id": listed[0]["id"]}], tools=[FLAT])).status_code == 200
    gone = await respond(server, input=[{"type": "item_reference", "id": "msg_x"}])
    assert gone.status_code == 400
    assert "refers to the item 'msg_x', which is not stored" in gone.json()["error"]["message"]


async def test_items_of_other_keys_are_not_found(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER, response_store_bytes=1 << 20, api_keys=("a", "b"))
    first = (await server.http.post("/v1/responses", json={"input": "Hi"}, headers={"Authorization": "Bearer a"})).json()
    body = {"input": [USER, {"type": "item_reference", "id": first["output"][0]["id"]}]}
    for key, status in (("a", 200), ("b", 400)):
        answer = await server.http.post("/v1/responses", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status, answer.text


# Calls that are cut off at their beginning


@pytest.mark.parametrize("stream", [False, True])
async def test_content_never_shows_the_beginning_of_a_call(start_server: StartServer, stream: bool) -> None:
    server = await started(start_server, "Well. " + CALL)
    shown = set()
    for limit in range(1, 40):
        response = await server.chat(tools=[TOOL], max_tokens=limit, stream=stream)
        if stream:
            deltas = [choice["delta"] for chunk in read_events(response.text)[:-1] for choice in chunk["choices"]]
            if any("tool_calls" in delta for delta in deltas):
                break
            shown.add("".join(delta.get("content") or "" for delta in deltas))
        else:
            content = response.json()["choices"][0]["message"]["content"]
            if '"name": "get_weather"' in (content or ""):
                break  # the name is known: what there is of the call is shown, as in a stream
            shown.add(content or "")
    assert all("Well. ".startswith(text) for text in shown), shown
    assert "Well." in shown

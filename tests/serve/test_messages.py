"""Anthropic's `/v1/messages` on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.serve.test_tool_calls import CALL, TEMPLATE, prompt_of, started
from tests.support.fake_engine import says

THINKING_TEMPLATE = "{{ 'thinks' if enable_thinking else 'answers' }}"


async def test_x_api_key_is_an_api_key(start_server: StartServer) -> None:
    server = await start_server(api_keys=("secret",))
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
        assert (await server.http.get("/v1/models", headers=headers)).status_code == status


async def test_errors_have_anthropics_shape(start_server: StartServer) -> None:
    server = await start_server(api_keys=("secret",), max_body_bytes=100)
    key = {"x-api-key": "secret"}
    unauthorized = await server.http.post("/v1/messages", json={})
    assert unauthorized.status_code == 401
    assert unauthorized.json()["type"] == "error"
    assert unauthorized.json()["error"]["type"] == "authentication_error"
    too_large = await server.http.post("/v1/messages", content=b"x" * 101, headers=key)
    assert (too_large.status_code, too_large.json()["error"]["type"]) == (413, "request_too_large")
    missing = await server.http.get("/v1/messages/nothing", headers=key)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert set((await server.http.get("/v1/nothing", headers=key)).json()["error"]) == {"message", "type", "param", "code"}


TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": TOOL["input_schema"], "strict": False, "description": "The weather"},
}
THINKS: dict[str, Any] = {"reasoning_parser": "qwen3"}
USER = [{"role": "user", "content": "Hi"}]


async def send(server: Server, **fields: Any) -> httpx.Response:
    return await server.http.post("/v1/messages", json={"messages": USER, "max_tokens": 100, **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names and types must be equal."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream."""
    message = events[0]["message"]
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(texts) - 1
            [key] = set(event["delta"]) - {"type"}
            texts[-1] += event["delta"][key]
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            if block["type"] == "tool_use":
                block["input"] = json.loads(texts[-1])
            else:
                block[block["type"]] = texts[-1]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert events[-1]["type"] == "message_stop"
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


async def test_a_message_has_anthropics_shape(server: Server) -> None:
    message = (await send(server, system="Be brief.")).json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "test-model")
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    assert message["usage"]["input_tokens"] == num_prompt
    assert message["usage"]["output_tokens"] == len(server.tokenizer.encode(ANSWER)) + 1
    assert prompt_of(server) == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        (ANSWER, {}, ["text"], "end_turn"),
        ("I look.\n" + CALL, {"tools": [TOOL]}, ["text", "tool_use"], "tool_use"),
        (CALL + "\n" + CALL, {"tools": [TOOL]}, ["tool_use", "tool_use"], "tool_use"),
        (CALL + CALL, {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["tool_use"], "tool_use"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "any"}}, ["tool_use"], "tool_use"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, ["tool_use"], "tool_use"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, ["text"], "end_turn"),
        ("<think>Hm.</think>" + ANSWER, {"thinking": {"type": "enabled", "budget_tokens": 50}}, ["thinking", "text"], "end_turn"),
        ("<think>Hm.</think>" + ANSWER, {"thinking": {"type": "adaptive"}}, ["thinking", "text"], "end_turn"),
        ("<think>Hm.</think>" + ANSWER, {}, ["text"], "end_turn"),
        (ANSWER, {"stop_sequences": ["wör"]}, ["text"], "stop_sequence"),
        (ANSWER, {"max_tokens": 2}, ["text"], "max_tokens"),
        ("", {}, [], "end_turn"),
    ],
)
async def test_a_stream_builds_the_whole_message(
    start_server: StartServer, text: str, fields: dict[str, Any], kinds: list[str], reason: str
) -> None:
    server = await started(start_server, text, **THINKS)
    fields = {"max_tokens": 400, **fields}
    message = (await send(server, **fields)).json()
    assert [block["type"] for block in message["content"]] == kinds
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == ("wör" if reason == "stop_sequence" else None)
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert (block["name"], block["input"]) == ("get_weather", {"city": "Zürich"})
            assert block["id"].startswith("toolu_")
    events = events_of(await send(server, **fields, stream=True))
    assert without_ids(message_of(events)) == without_ids(message)


async def test_history_reaches_the_template(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER, **THINKS)
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "user", "content": [{"type": "text", "text": "Now?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "none", "is_error": True},
                {"type": "text", "text": "Thanks"},
            ],
        },
    ]
    system = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert (await send(server, messages=messages, tools=[TOOL], system=system)).status_code == 200
    assert prompt_of(server) == (
        json.dumps([CHAT_TOOL], ensure_ascii=False) + "<|start|>system\nA\nB<|end|>\n<|start|>user\nWeather?\nNow?<|end|>\n"
        '<|start|>assistant\n<think>I must look.</think><tool_call>get_weather:{"city": "Zürich"}</tool_call><|end|>\n'
        "<|start|>tool\nsunny<|end|>\n<|start|>tool\nError: none<|end|>\n<|start|>user\nThanks<|end|>\n<|start|>assistant\n"
    )
    counted = await server.http.post("/v1/messages/count_tokens", json={"messages": messages, "tools": [TOOL], "system": system})
    assert counted.json() == {"input_tokens": len(server.engine.requests[-1].prompt_token_ids)}


async def test_consecutive_messages_of_a_role_are_joined(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER, **THINKS)
    call = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {}}
    messages = [
        *({"role": "user", "content": text} for text in ("a", "b", "c")),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, call]},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}, call]},
        *USER,
    ]
    await send(server, messages=messages)
    rendered = "<tool_call>get_weather:{}</tool_call>"
    assert prompt_of(server) == (
        f"<|start|>user\na\nb\nc<|end|>\n<|start|>assistant\n<think>Hm.\nSo.</think>d\ne{rendered}{rendered}<|end|>\n"
        "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    )


async def test_a_last_message_of_the_assistant_is_continued(server: Server) -> None:
    await send(server, messages=[*USER, {"role": "assistant", "content": "Well, "}])
    assert prompt_of(server).endswith("<|start|>assistant\nWell, ")


async def test_structured_output_and_thinking_reach_the_engine(start_server: StartServer) -> None:
    server = await started(start_server, "<think>x</think>{}", **THINKS, chat_template=THINKING_TEMPLATE)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    output = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    await send(server, thinking={"type": "enabled", "budget_tokens": 7}, top_k=3, **output)
    params = server.engine.requests[-1].sampling_params
    assert params.structured_outputs.thinking_token_budget == 7
    assert '"a"' in params.structured_outputs.compiled
    assert (params.top_k, prompt_of(server)) == (3, "thinks")
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        await send(server, **fields)
        assert prompt_of(server) == "answers"


async def test_thinking_has_no_effect_without_a_reasoning_parser(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER)
    for kind in ({"type": "enabled", "budget_tokens": 5}, {"type": "adaptive"}):
        answer = (await send(server, thinking=kind)).json()
        assert [block["type"] for block in answer["content"]] == ["text"]
        assert server.engine.requests[-1].sampling_params.structured_outputs is None


async def test_cached_tokens_are_reported_where_the_server_reports_them(start_server: StartServer) -> None:
    server = await start_server(prompt_tokens_details=True)
    num_prompt = None
    for stream in (False, True):
        response = await send(server, stream=stream)
        message = message_of(events_of(response)) if stream else response.json()
        num_prompt = len(server.engine.requests[-1].prompt_token_ids)
        usage = message["usage"]
        assert usage["cache_read_input_tokens"] == num_prompt // 2
        assert usage["input_tokens"] == num_prompt - num_prompt // 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be user, assistant or system"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] has the type 'image'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id must be"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be"),
        ({"system": [{"type": "image"}]}, "system[0] has the type 'image'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be"),
        ({"tools": [{**TOOL, "name": "x" * 300}]}, "tools[0].name must be a text of 1 to 256"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "must"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature must be"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must be"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
        ({"messages": [{"role": "user", "content": "x" * 10000}]}, "256"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_requests_are_a_400(start_server: StartServer, fields: dict[str, Any], message: str, stream: bool) -> None:
    server = await start_server(chat_template=TEMPLATE, tool_call_parser="hermes")
    response = await send(server, stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


async def test_unknown_model_is_a_404(server: Server) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await server.http.post(path, json={"messages": USER, "max_tokens": 5, "model": "claude"})
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


async def test_failures_of_the_engine(server: Server) -> None:
    server.engine.fail_requests = "The step failed."
    failed = await send(server)
    assert (failed.status_code, failed.json()["error"]) == (500, {"type": "api_error", "message": "The step failed."})
    *_, last = events_of(await send(server, stream=True))
    assert last == {"type": "error", "error": {"type": "api_error", "message": "The step failed."}}
    server.engine.fail_requests = None
    server.engine.die("The engine died.")
    dead = await send(server)
    assert (dead.status_code, dead.json()["error"]["type"]) == (503, "overloaded_error")


async def test_a_client_that_goes_away_frees_its_sequence(start_server: StartServer, tokenizer: Tokenizer, over_tcp: Any) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005})
    url = await over_tcp(server)
    body = {"messages": USER, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient() as client:
        async with client.stream("POST", f"{url}/v1/messages", json=body) as response:
            async for _ in response.aiter_bytes():
                break
    await eventually(lambda: server.engine.num_running == 0)
    assert len(server.engine.aborted) == 1

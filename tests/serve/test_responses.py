"""OpenAI's `/v1/responses` on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.response_store import MAX_RESPONSE_BYTES, ResponseStore, StoredResponse
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.serve.test_tool_calls import CALL, TEMPLATE, prompt_of, started
from tests.support.fake_engine import says

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THINKS: dict[str, Any] = {"reasoning_parser": "qwen3"}
STORES: dict[str, Any] = {"response_store_bytes": 1 << 20}


async def send(server: Server, **fields: Any) -> httpx.Response:
    return await server.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 100, **fields})


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=server.http, max_retries=0)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names, types and sequence numbers must fit."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def output_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client builds from a stream, whose events must be in OpenAI's order."""
    items: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "item_id" in event:
            assert is_open
            assert (event["output_index"], event["item_id"]) == (len(items) - 1, items[-1]["id"])
        if kind == "output_item.added":
            assert not is_open
            is_open = True
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
            assert event["part"]["text"] == ""
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            if kind == "output_text.delta":
                items[-1]["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            part = items[-1]["content"][event["content_index"]]
            assert {name: event[name] for name in ("text", "logprobs") if name in event} == {
                name: part[name] for name in ("text", "logprobs") if name in part
            }
        elif kind == "content_part.done":
            assert items[-1]["content"][event["content_index"]] == event["part"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (items[-1]["arguments"], items[-1]["name"]) == (event["arguments"], event["name"])
        elif kind == "output_item.done":
            assert {**items[-1], "status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
            is_open = False
        else:
            assert kind in ("created", "in_progress", "completed", "incomplete")
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert not is_open
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


async def test_a_response_has_openais_shape(server: Server) -> None:
    response = (await send(server, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)).json()
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "test-model")
    [item] = response["output"]
    assert item["id"].startswith("msg_")
    part = {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    assert without_ids([item]) == [{"type": "message", "status": "completed", "role": "assistant", "content": [part]}]
    assert (response["metadata"], response["temperature"], response["instructions"]) == ({"a": "b"}, 0.5, "Be brief.")
    assert (response["store"], response["error"], response["incomplete_details"]) == (False, None, None)
    num_prompt = len(server.engine.requests[0].prompt_token_ids)
    num_new = len(server.tokenizer.encode(ANSWER)) + 1
    assert response["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_new,
    }
    assert prompt_of(server) == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (ANSWER, {}, ["message"]),
    ("", {}, ["message"]),
    ("I look.\n" + CALL, {"tools": [TOOL]}, ["message", "function_call"]),
    (CALL + "\n" + CALL, {"tools": [TOOL]}, ["function_call", "function_call"]),
    (CALL + CALL, {"tools": [TOOL], "parallel_tool_calls": False}, ["function_call"]),
    (CALL, {"tools": [TOOL], "tool_choice": "required"}, ["function_call"]),
    (CALL, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}}, ["function_call"]),
    (CALL, {"tools": [TOOL], "tool_choice": "none"}, ["message"]),
    ("<think>Hm.</think>" + ANSWER, {}, ["reasoning", "message"]),
    ("<think>Hm.</think>" + CALL, {"tools": [TOOL]}, ["reasoning", "function_call"]),
    ("<think>Hm.", {}, ["reasoning"]),
]


@pytest.mark.parametrize(("text", "fields", "kinds"), CASES)
async def test_a_stream_builds_the_whole_response(start_server: StartServer, text: str, fields: dict[str, Any], kinds: list[str]) -> None:
    server = await started(start_server, text, **THINKS)
    fields = {"max_output_tokens": 400, **fields}
    response = (await send(server, **fields)).json()
    assert [item["type"] for item in response["output"]] == kinds
    assert {item["status"] for item in response["output"]} == {"completed"}
    for item in response["output"]:
        if item["type"] == "function_call":
            assert (item["name"], json.loads(item["arguments"])) == ("get_weather", {"city": "Zürich"})
            assert item["call_id"].startswith("call_")
    events = events_of(await send(server, **fields, stream=True))
    assert events[-1]["type"] == "response.completed"
    streamed = events[-1]["response"]
    assert output_of(events) == streamed["output"]
    assert without_ids(streamed["output"]) == without_ids(response["output"])
    assert streamed["usage"]["total_tokens"] == response["usage"]["total_tokens"]
    assert (streamed["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == (kinds[0] == "reasoning")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(start_server: StartServer, stream: bool) -> None:
    server = await started(start_server, CALL)
    for tools, num_tokens in (([], 2), ([TOOL], 60)):
        answer = await send(server, max_output_tokens=num_tokens, tools=tools, stream=stream)
        events = events_of(answer) if stream else []
        response = events[-1]["response"] if stream else answer.json()
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        if stream:
            assert events[-1]["type"] == "response.incomplete"
            assert output_of(events) == response["output"]
        else:
            assert CALL.startswith(response["output"][0]["content"][0]["text"])


async def test_items_reach_the_template(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER, **THINKS)
    items = [
        {"role": "developer", "content": "Answer in German."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I must look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": '{"city": "Zürich"}'},
        {"type": "function_call", "call_id": "2", "name": "get_weather", "arguments": "{", "status": "incomplete"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "message", "role": "user", "content": "Thanks"},
    ]
    assert (await send(server, input=items, tools=[TOOL], instructions="Be brief.")).status_code == 200
    assert prompt_of(server).partition("<|start|>")[2] == (
        "system\nBe brief.\nAnswer in German.<|end|>\n<|start|>user\nWeather?<|end|>\n"
        '<|start|>assistant\n<think>I must look.</think>Wait.<tool_call>get_weather:{"city": "Zürich"}</tool_call><|end|>\n'
        "<|start|>tool\nsunny<|end|>\n<|start|>user\nThanks<|end|>\n<|start|>assistant\n"
    )


async def test_only_allowed_tools_are_shown(start_server: StartServer) -> None:
    server = await started(start_server, CALL)
    other = {"type": "function", "name": "now"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    response = (await send(server, tools=[TOOL, other], tool_choice=allowed)).json()
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert '"now"' not in prompt_of(server)
    assert response["tool_choice"] == allowed


async def test_fields_reach_the_engine(start_server: StartServer) -> None:
    server = await started(start_server, "<think>x</think>{}", **THINKS)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    fields = {"text": text, "top_k": 3, "top_p": 0.5, "seed": 7, "stop": ["a"], "thinking_token_budget": 9, "cache_salt": "s"}
    response = (await send(server, **fields)).json()
    assert response["text"] == text
    request = server.engine.requests[-1]
    params = request.sampling_params
    assert (params.top_k, params.top_p, params.seed, request.cache_salt) == (3, 0.5, 7, "s")
    assert params.structured_outputs.thinking_token_budget == 9
    assert '"a"' in params.structured_outputs.compiled


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0] refers to the item 'x', but this server stores none"),
        ({"input": [{"id": "x"}]}, "input", "input[0] refers to the item 'x', but this server stores none: start the server with"),
        ({"input": [{}]}, "input", "input[0] has the type None"),
        ({"input": [{"content": "x"}]}, "input", "input[0] has the type None"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only reads text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input", "input[0].content[0].text must"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 300}, "input", "lower max_output_tokens"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools", "tools[0].name must be"),
        ({"tools": [{**TOOL, "parameters": 5}]}, "tools", "tools[0].parameters must be"),
        ({"tool_choice": {"type": "file_search"}, "tools": [TOOL]}, "tool_choice", "tool_choice must be"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}}, "tool_choice", "not one of"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": []}]}}, "tool_choice", "not one of"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type must be"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format.schema must be"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format", "text.format"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 30}, "top_logprobs", "in [0, 20]"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "no prompt templates"),
        ({"background": True, "stream": False}, "background", "--response-store"),
        ({"background": True, "stream": True}, "background", "cannot be streamed"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "--response-store"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "metadata"),
        ({"truncation": "yes"}, "truncation", "truncation"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_requests_are_a_400(start_server: StartServer, fields: dict[str, Any], param: str, message: str, stream: bool) -> None:
    server = await start_server(chat_template=TEMPLATE, tool_call_parser="hermes")
    response = await send(server, **{"stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (ANSWER, [ANSWER]),
        ("", [""]),
        ("<think>Is it Paris?</think>\n\nParis 🙂, <b>I think</b>", ["Paris 🙂, <b>I think</b>"]),
        ("I look.\n" + CALL, ["I look.\n"]),
    ],
)
async def test_logprobs_are_those_of_the_messages_tokens(start_server: StartServer, text: str, messages: list[str]) -> None:
    server = await started(start_server, text, **THINKS)
    fields = {"tools": [TOOL], "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 150}
    response = (await send(server, **fields)).json()
    assert response["top_logprobs"] == 2
    parts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    assert [part["text"].strip() for part in parts] == [message.strip() for message in messages]
    for part in parts:
        raw = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
        assert part["text"].encode() in raw
        assert len(raw) <= len(part["text"].encode()) + 4  # a token may have the beginning of a marker too
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in part["logprobs"])
    streamed = output_of(events_of(await send(server, stream=True, **fields)))
    assert without_ids(streamed) == without_ids(response["output"])
    plain = (await send(server, tools=[TOOL], max_output_tokens=150)).json()
    assert all(item["content"][0]["logprobs"] == [] for item in plain["output"] if item["type"] == "message")


async def test_truncation_keeps_the_end_of_a_long_prompt(server: Server) -> None:
    response = await send(server, input="word " * 300, truncation="auto")
    assert response.json()["status"] == "completed"
    assert len(server.engine.requests[0].prompt_token_ids) == 156


async def test_failures_of_the_engine(server: Server) -> None:
    server.engine.fail_requests = "The step failed."
    failed = await send(server)
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "The step failed.")
    *_, last = events_of(await send(server, stream=True))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The step failed."}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_shutdown_is_a_failure_with_the_text_so_far(start_server: StartServer, tokenizer: Tokenizer, stream: bool) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005})
    sending = asyncio.create_task(send(server, stream=stream, ignore_eos=True, max_output_tokens=200))
    await eventually(lambda: server.engine.num_running == 1)
    server.app.state.context.engine.cancel_all()
    answer = await sending
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert [item["status"] for item in response["output"]] == ["incomplete"]


async def test_responses_are_not_stored_by_default(server: Server) -> None:
    response = (await send(server, store=True)).json()
    assert response["store"] is False
    path = f"/v1/responses/{response['id']}"
    for method, route in (("GET", path), ("DELETE", path), ("POST", path + "/cancel"), ("GET", path + "/input_items")):
        answer = await server.http.request(method, route)
        assert answer.status_code == 404
        assert "--response-store" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_can_be_read_continued_and_deleted(start_server: StartServer, stream: bool) -> None:
    server = await start_server(**STORES)
    answer = await send(server, instructions="Be brief.", stream=stream)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    assert response["store"] is True
    path = f"/v1/responses/{response['id']}"
    assert (await server.http.get(path)).json() == response
    second = (await send(server, input="More", previous_response_id=response["id"])).json()
    assert second["previous_response_id"] == response["id"]
    expected = f"<|start|>user\nHi<|end|>\n<|start|>assistant\n{ANSWER}<|end|>\n<|start|>user\nMore<|end|>\n"
    assert prompt_of(server) == expected + "<|start|>assistant\n"
    items = (await server.http.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"})).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["Hi", ANSWER, "More"]
    assert (await server.http.get(path, params={"stream": True})).status_code == 400
    assert (await server.http.post(path + "/cancel")).status_code == 400
    assert (await server.http.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    assert (await server.http.get(path)).status_code == 404
    assert (await server.http.delete(path)).status_code == 404
    assert (await send(server, previous_response_id=response["id"])).status_code == 400


async def test_store_false_is_honoured(start_server: StartServer) -> None:
    server = await start_server(**STORES)
    response = (await send(server, store=False)).json()
    assert response["store"] is False
    assert (await server.http.get(f"/v1/responses/{response['id']}")).status_code == 404
    assert len(server.app.state.context.stored_responses) == 0


async def test_a_stored_response_belongs_to_its_key(start_server: StartServer) -> None:
    server = await start_server(api_keys=("one", "two"), **STORES)
    server.http.headers["Authorization"] = "Bearer one"
    first = (await send(server)).json()
    path = f"/v1/responses/{first['id']}"
    server.http.headers["Authorization"] = "Bearer two"
    for method, route in (("GET", path), ("DELETE", path), ("POST", path + "/cancel"), ("GET", path + "/input_items")):
        assert (await server.http.request(method, route)).status_code == 404
    assert (await send(server, previous_response_id=first["id"])).status_code == 400
    server.http.headers["Authorization"] = "Bearer one"
    assert (await server.http.get(path)).status_code == 200


async def test_input_items_come_in_pages(start_server: StartServer) -> None:
    server = await start_server(**STORES)
    texts = [str(number) for number in range(5)]
    response = (await send(server, input=[{"role": "user", "content": text} for text in texts])).json()
    path = f"/v1/responses/{response['id']}/input_items"
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await server.http.get(path, params={"limit": 2, **after})).json()
        seen += [item["content"][0]["text"] for item in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        after = {"after": page["last_id"]}
        if not page["has_more"]:
            break
    assert seen == texts[::-1]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
        assert (await server.http.get(path, params=wrong)).status_code == 400


async def test_a_background_response_is_polled(start_server: StartServer) -> None:
    server = await start_server(**STORES)
    server.engine.hold.clear()
    response = (await send(server, background=True)).json()
    assert (response["status"], response["background"], response["output"]) == ("in_progress", True, [])
    path = f"/v1/responses/{response['id']}"
    assert (await server.http.get(path)).json() == response
    assert (await send(server, previous_response_id=response["id"])).status_code == 400
    server.engine.hold.set()
    store = server.app.state.context.stored_responses
    await eventually(lambda: not store.tasks)
    done = (await server.http.get(path)).json()
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", ANSWER)
    assert (await server.http.post(path + "/cancel")).json() == done


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_background_response_can_be_ended(start_server: StartServer, tokenizer: Tokenizer, how: str) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005}, **STORES)
    response = (await send(server, background=True, ignore_eos=True)).json()
    path = f"/v1/responses/{response['id']}"
    if how == "cancel":
        assert (await server.http.post(path + "/cancel")).json()["status"] == "cancelled"
        assert (await server.http.get(path)).json()["status"] == "cancelled"
    else:
        assert (await server.http.delete(path)).status_code == 200
        assert (await server.http.get(path)).status_code == 404
    await eventually(lambda: server.engine.num_running == 0)
    assert len(server.engine.aborted) == 1
    assert not server.app.state.context.stored_responses.tasks


async def test_a_background_response_keeps_its_failure(start_server: StartServer) -> None:
    server = await start_server(**STORES)
    server.engine.fail_requests = "The step failed."
    response = (await send(server, background=True)).json()
    await eventually(lambda: not server.app.state.context.stored_responses.tasks)
    failed = (await server.http.get(f"/v1/responses/{response['id']}")).json()
    assert (failed["status"], failed["error"]["message"]) == ("failed", "The step failed.")


def test_one_response_is_bounded() -> None:
    store = ResponseStore(1 << 30, 10.0)
    store.put("big", None, StoredResponse({"text": "x" * MAX_RESPONSE_BYTES}, []))
    assert len(store) == 0


def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = 0.0
    store = ResponseStore(1000, 10.0, clock=lambda: now)
    stored = StoredResponse({"text": "x" * 300}, [])
    for name in ("a", "b", "c"):
        now += 1
        store.put(name, None, stored)
    assert [name for name in "abc" if store.get(name, None)] == ["b", "c"]
    store.put("big", None, StoredResponse({"text": "x" * 1000}, []))
    assert store.get("big", None) is None
    assert len(store) == 2
    store.put("b", None, stored)  # stored again, so "c" is now the oldest
    store.put("d", None, stored)
    store.put("e", None, stored)
    assert [name for name in "bcde" if store.get(name, None)] == ["d", "e"]
    now += 10
    assert len(store) == 0
    store.put("f", "key", stored)
    assert store.get("f", None) is None
    assert not store.delete("f", "other")
    assert store.delete("f", "key")


def test_one_key_cannot_push_out_the_responses_of_another() -> None:
    store = ResponseStore(1000, 10.0)
    stored = StoredResponse({"text": "x" * 300}, [])
    store.put("mine", "quiet", stored)
    for number in range(5):
        store.put(f"loud-{number}", "loud", stored)
    assert store.get("mine", "quiet") is not None
    assert [number for number in range(5) if store.get(f"loud-{number}", "loud")] == [4]


async def test_a_client_that_goes_away_frees_its_sequence(start_server: StartServer, tokenizer: Tokenizer, over_tcp: Any) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005}, **STORES)
    url = await over_tcp(server)
    body = {"input": "Hi", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient() as client:
        async with client.stream("POST", f"{url}/v1/responses", json=body) as response:
            async for _ in response.aiter_bytes():
                break
    await eventually(lambda: server.engine.num_running == 0)
    assert len(server.engine.aborted) == 1
    await asyncio.sleep(0)
    assert len(server.app.state.context.stored_responses) == 0


class Weather(BaseModel):
    city: str


async def test_openais_client_streams_and_parses(start_server: StartServer) -> None:
    server = await start_server(script=says((await start_server()).tokenizer, '{"city": "Zürich"}'), **STORES)
    client = client_of(server)
    parsed = await client.responses.parse(model="test-model", input="Hi", text_format=Weather, max_output_tokens=100)
    assert parsed.output_parsed == Weather(city="Zürich")
    async with client.responses.stream(model="test-model", input="Hi", text_format=Weather, max_output_tokens=100) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_parsed == Weather(city="Zürich")
    again = await client.responses.retrieve(final.id)
    assert again.output_text == final.output_text
    page = await client.responses.input_items.list(final.id)
    assert len(page.data) == 1
    await client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(final.id)

"""Tool calls and reasoning through `/v1/chat/completions` on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from compile_and_serve.runtime.parsers.registry import ParserError
from tests.serve.conftest import Server, StartServer
from tests.support.fake_engine import says
from tests.support.sse import read_events

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + ':' + c.function.arguments }}</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HERMES: dict[str, Any] = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "enable_auto_tool_choice": True}


async def started(start_server: StartServer, text: str, **settings: Any) -> Server:
    plain = await start_server()
    engine = {"max_model_len": 2048}
    return await start_server(script=says(plain.tokenizer, text), engine=engine, **{**HERMES, **settings})


def prompt_of(server: Server) -> str:
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def grammar_of(server: Server) -> Any:
    return server.engine.requests[-1].sampling_params.structured_outputs


def streamed(text: str) -> tuple[str, str, dict[int, dict[str, str]], str]:
    """Content, reasoning, calls and the finish reason of a stream."""
    content, reasoning, calls, finish = "", "", {}, ""
    *chunks, _ = read_events(text)
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["type"] == "function"
                assert part["function"]["arguments"] == ""
                calls[part["index"]] = {"name": part["function"]["name"], "arguments": "", "id": part["id"]}
            else:
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return content, reasoning, calls, finish


async def test_auto_call_in_openais_shape(start_server: StartServer) -> None:
    server = await started(start_server, "I look.\n" + CALL)
    choice = (await server.chat(tools=[TOOL])).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    assert grammar_of(server) is None
    assert json.dumps(TOOL, ensure_ascii=False) in prompt_of(server)


async def test_streamed_call_equals_the_whole_one(start_server: StartServer) -> None:
    server = await started(start_server, "I look.\n" + CALL + CALL)
    content, _, calls, finish = streamed((await server.chat(tools=[TOOL], stream=True, max_tokens=400)).text)
    assert (content, finish, len(calls)) == ("I look.", "tool_calls", 2)
    assert [call["arguments"] for call in calls.values()] == ['{"city": "Zürich"}'] * 2
    assert len({call["id"] for call in calls.values()}) == 2


async def test_parallel_tool_calls_false_keeps_the_first(start_server: StartServer) -> None:
    server = await started(start_server, CALL + CALL)
    answer = (await server.chat(tools=[TOOL], parallel_tool_calls=False, max_tokens=400)).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    _, _, calls, _ = streamed((await server.chat(tools=[TOOL], parallel_tool_calls=False, stream=True, max_tokens=400)).text)
    assert list(calls) == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_and_unfinished_calls_are_content(start_server: StartServer, stream: bool) -> None:
    for text in ("<tool_call>\n{get_weather}\n</tool_call>", "no call <tool", "<tool_call>"):
        server = await started(start_server, text)
        response = await server.chat(tools=[TOOL], stream=stream)
        if stream:
            content, _, calls, finish = streamed(response.text)
        else:
            choice = response.json()["choices"][0]
            content, calls, finish = (choice["message"]["content"], choice["message"].get("tool_calls", []), choice["finish_reason"])
        assert (content, len(calls), finish) == (text, 0, "stop")
    server = await started(start_server, CALL)
    choice = (await server.chat(tools=[TOOL], max_tokens=60)).json()["choices"][0]
    assert (choice["message"].get("tool_calls"), choice["finish_reason"]) == (None, "length")
    assert CALL.startswith(choice["message"]["content"])


async def test_tool_choice_none_hides_the_tools(start_server: StartServer) -> None:
    server = await started(start_server, CALL)
    choice = (await server.chat(tools=[TOOL], tool_choice="none")).json()["choices"][0]
    assert (choice["message"]["content"], choice["message"].get("tool_calls")) == (CALL, None)
    assert "get_weather" not in prompt_of(server)


async def test_history_is_rendered_by_the_template(start_server: StartServer) -> None:
    server = await started(start_server, "It is sunny.")
    calls = [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "I must look."},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ]
    answer = (await server.chat(messages=messages, tools=[TOOL])).json()
    assert answer["choices"][0]["message"]["content"] == "It is sunny."
    prompt = prompt_of(server)
    assert '<think>I must look.</think><tool_call>get_weather:{"city": "Zürich"}</tool_call><|end|>' in prompt
    assert "<|start|>tool\nsunny<|end|>\n<|start|>assistant\nSunny.<|end|>" in prompt


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function must be an object"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name must be"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice must be 'none'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice must be like"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice names 'x'"),
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice needs tools"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_TOOLS)
async def test_wrong_tools_are_a_400(start_server: StartServer, fields: dict[str, Any], message: str) -> None:
    server = await started(start_server, CALL)
    response = await server.chat(**fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


NAMED = {"type": "function", "function": {"name": "get_weather"}}
JSON_LIST = '[{"name": "get_weather", "parameters": {"city": "Zürich"}}, {"name": "now", "parameters": {}}]'


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
async def test_forced_call_in_the_models_format(start_server: StartServer, choice: Any, stream: bool) -> None:
    server = await started(start_server, CALL)
    response = await server.chat(tools=[TOOL, OTHER], tool_choice=choice, stream=stream)
    if stream:
        content, _, calls, finish = streamed(response.text)
        names = [call["name"] for call in calls.values()]
    else:
        [answer] = response.json()["choices"]
        content, finish = answer["message"]["content"] or "", answer["finish_reason"]
        names = [call["function"]["name"] for call in answer["message"]["tool_calls"]]
    assert (content, names, finish) == ("", ["get_weather"], "tool_calls")
    compiled = grammar_of(server).compiled
    assert "<tool_call>" in compiled
    assert "get_weather" in compiled
    assert ("now" in compiled) == (choice == "required")


async def test_forced_calls_need_no_parser(start_server: StartServer) -> None:
    """A template that knows tools but no known format: a JSON list, as in vLLM. One that knows none: Hermes' format."""
    settings = {"tool_call_parser": None, "enable_auto_tool_choice": False}
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    server = await started(start_server, JSON_LIST, **settings, chat_template="{{ tools }}" + plain)
    answer = (await server.chat(tools=[TOOL, OTHER], tool_choice="required", max_tokens=300)).json()
    message = answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    server = await started(start_server, CALL, **settings, chat_template=plain)
    calls = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    answer = (await server.chat(messages=messages, tools=[TOOL], tool_choice="required")).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    prompt = prompt_of(server)
    assert prompt.startswith("system: Be brief.\n\nYou may call these functions")
    assert 'assistant: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "user: <tool_response>\nnoon\n</tool_response>" in prompt


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v3", "pythonic", "granite", "phi4"])
async def test_grammar_of_every_format_compiles(start_server: StartServer, parser: str) -> None:
    server = await started(start_server, CALL, tool_call_parser=parser)
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tool_choice": "auto"}):
        for parallel in (True, False):
            response = await server.chat(tools=[strict, OTHER], parallel_tool_calls=parallel, **fields)
            assert response.status_code == 200, response.text
        has_trigger = parser in ("hermes", "mistral", "deepseek_v3", "granite", "phi4")
        assert (grammar_of(server) is not None) == (has_trigger or fields["tool_choice"] != "auto")


async def test_invalid_schema_is_a_400_with_its_path(start_server: StartServer) -> None:
    server = await started(start_server, CALL)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}}}
    response = await server.chat(tools=[tool], tool_choice="required", stream=True)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert "properties" in error["message"]
    text = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    response = await server.chat(tools=[text], tool_choice="required")
    assert response.status_code == 400
    assert "must have the type 'object', got 'string'" in response.json()["error"]["message"]


async def test_grammar_begins_after_the_reasoning(start_server: StartServer) -> None:
    server = await started(start_server, "<think>I look.</think>" + CALL, reasoning_parser="qwen3")
    message = (await server.chat(tools=[TOOL], tool_choice="required")).json()["choices"][0]["message"]
    assert (message["reasoning"], len(message["tool_calls"])) == ("I look.", 1)
    assert grammar_of(server).begins_after == [server.tokenizer.encode("</think>")]
    closed = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
    server = await started(start_server, CALL, reasoning_parser="qwen3", chat_template=closed)
    await server.chat(tools=[TOOL], tool_choice="required")
    assert grammar_of(server).begins_after == []


async def test_auto_without_a_parser_is_a_400(server: Server) -> None:
    for fields in ({}, {"tool_choice": "auto"}):
        response = await server.chat(tools=[TOOL], **fields)
        assert response.status_code == 400
        assert "--tool-call-parser NAME" in response.json()["error"]["message"]
    tokens = await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]})
    assert tokens.status_code == 200


async def test_server_refuses_to_start_without_the_parser(start_server: StartServer) -> None:
    for settings in ({"enable_auto_tool_choice": True}, {"tool_call_parser": "absent"}, {"reasoning_parser": "absent"}):
        with pytest.raises(ParserError):
            await start_server(**settings)


async def test_parser_is_detected_from_the_template(start_server: StartServer) -> None:
    template = TEMPLATE + '{# <tool_call>{"arguments": …}</tool_call> #}'
    server = await started(start_server, CALL, tool_call_parser=None, chat_template=template)
    choice = (await server.chat(tools=[TOOL])).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"


async def test_openai_sdk_reads_the_stream(start_server: StartServer, over_tcp: Any) -> None:
    server = await started(start_server, CALL)
    async with openai.AsyncOpenAI(base_url=await over_tcp(server) + "/v1", api_key="none", max_retries=0) as client:
        tool: Any = {**TOOL, "function": {**TOOL["function"], "strict": False}}  # type: ignore[dict-item]
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        async with client.chat.completions.stream(model="alias", messages=messages, tools=[tool], max_tokens=100) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert json.loads(calls[0].function.arguments) == {"city": "Zürich"}  # type: ignore[union-attr]


THOUGHT = "<think>\nI think.\n</think>\n\nC"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_reasoning_is_apart_from_the_content(start_server: StartServer, stream: bool, include: bool) -> None:
    server = await started(start_server, THOUGHT, reasoning_parser="deepseek_r1")
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await server.chat(stream=stream, include_reasoning=include, **options)
    if stream:
        *chunks, last, _ = read_events(response.text)
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, "[DONE]"])
        content, reasoning, _, finish = streamed(body)
        usage = last["usage"]
    else:
        answer = response.json()
        message, finish, usage = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"], answer["usage"]
        content, reasoning = message["content"], message["reasoning"] or ""
    assert (content, reasoning, finish) == ("C", "I think." if include else "", "stop")
    num = len(server.tokenizer.encode("<think>\nI think.\n</think>"))
    assert num <= usage["completion_tokens_details"]["reasoning_tokens"] <= num + 4


async def test_calls_follow_reasoning(start_server: StartServer) -> None:
    server = await started(start_server, "<think>\nI look.</think>\n" + CALL, reasoning_parser="qwen3")
    message = (await server.chat(tools=[TOOL])).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("I look.", None, 1)


async def test_reasoning_effort_reaches_the_template(start_server: StartServer) -> None:
    server = await started(start_server, "C", chat_template=TEMPLATE + "{{ reasoning_effort }}")
    await server.chat(reasoning_effort="low")
    assert prompt_of(server).endswith("low")


async def test_thinking_budget_reaches_the_engine(start_server: StartServer) -> None:
    server = await started(start_server, THOUGHT, reasoning_parser="qwen3")
    assert (await server.chat(thinking_token_budget=7)).status_code == 200
    structured = grammar_of(server)
    encode = server.tokenizer.encode
    assert (structured.thinking_token_budget, structured.is_free) == (7, True)
    assert (structured.begins_after, structured.thinking_starts) == ([encode("</think>")], encode("<think>"))
    await server.chat(thinking_token_budget=-1)
    assert grammar_of(server) is None
    plain = await start_server()
    response = await plain.chat(thinking_token_budget=7)
    assert response.status_code == 400
    assert "--reasoning-parser" in response.json()["error"]["message"]


def _kimi_call(name: str) -> str:
    return f'<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{"city": "Rome"}}<|tool_call_end|>'


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_kimi_count_the_calls_of_the_conversation(start_server: StartServer, stream: bool) -> None:
    """The chat template shows them, and the model was trained on functions.NAME:INDEX."""
    written = f"<|tool_calls_section_begin|>{_kimi_call('get_weather')}{_kimi_call('now')}<|tool_calls_section_end|>"
    server = await started(start_server, written, tool_call_parser="kimi_k2")
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for turn in range(2):
        response = await server.chat(tools=[TOOL], messages=messages, stream=stream, max_tokens=400)
        if stream:
            deltas = [choice["delta"] for chunk in read_events(response.text)[:-1] for choice in chunk["choices"]]
            calls = [call for delta in deltas for call in delta.get("tool_calls", []) if "id" in call]
        else:
            calls = response.json()["choices"][0]["message"]["tool_calls"]
        assert [call["id"] for call in calls] == [f"functions.get_weather:{2 * turn}", f"functions.now:{2 * turn + 1}"]
        sent = [{"id": call["id"], "type": "function", "function": {"name": "now", "arguments": "{}"}} for call in calls]
        messages.append({"role": "assistant", "content": None, "tool_calls": sent})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]


async def test_ids_of_kimi_are_the_same_in_the_other_apis(start_server: StartServer) -> None:
    written = f"<|tool_calls_section_begin|>{_kimi_call('get_weather')}{_kimi_call('now')}<|tool_calls_section_end|>"
    server = await started(start_server, written, tool_call_parser="kimi_k2")
    flat = {"type": "function", **TOOL["function"]}
    output = (await server.http.post("/v1/responses", json={"input": "Hi", "tools": [flat]})).json()["output"]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 400,
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
    }
    content = (await server.http.post("/v1/messages", json=body)).json()["content"]
    for ids in ([item["call_id"] for item in output], [block["id"] for block in content]):
        assert ids == ["functions.get_weather:0", "functions.now:1"]

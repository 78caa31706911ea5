"""What agents send beyond the published APIs, and conversations that must not end in a refusal, on a scripted engine."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from compile_and_serve.serve.protocol import client_parts
from tests.serve.conftest import ANSWER, Server, StartServer
from tests.serve.test_responses import output_of
from tests.serve.test_responses import send as respond
from tests.serve.test_tool_calls import CALL, TEMPLATE, TOOL, prompt_of, started

FLAT: dict[str, Any] = {"type": "function", **TOOL["function"]}
ANTHROPIC: dict[str, Any] = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "S: /x/"},
}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+ä"}}\n</tool_call>'
USER = {"role": "user", "content": "Hi"}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


async def message(server: Server, messages: list[Any], **fields: Any) -> Any:
    return await server.http.post("/v1/messages", json={"messages": messages, "max_tokens": 100, **fields})


@pytest.mark.parametrize(
    "other",
    [
        {"type": "web_search"},
        {"type": "web_search_preview", "search_context_size": "low"},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "x", "parameters": {"type": "object"}},
        {"type": "mcp", "server_label": "a", "server_url": "http://a"},
        {"type": "computer_use_preview"},
        {"type": "namespace", "name": "extras", "description": "More.", "tools": []},
        {"type": "of next year"},
    ],
)
async def test_tools_that_the_server_cannot_run_are_left_out(
    start_server: StartServer, other: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_parts, "_warned", set())
    server = await started(start_server, ANSWER)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await respond(server, tools=[FLAT, other])).status_code == 200
            with_other = prompt_of(server)
            assert (await server.chat(tools=[other, TOOL])).status_code == 200
            assert prompt_of(server) == with_other.replace('"strict": false, ', "")
    warnings = [record.message for record in caplog.records if "Requests contain tools" in record.message]
    assert len(warnings) == (0 if other["type"] == "namespace" else 1)
    await respond(server, tools=[FLAT])
    assert prompt_of(server) == with_other
    assert (await respond(server, tools=[other], tool_choice="auto")).status_code == 200
    assert (await server.chat(tools=[other], tool_choice="required")).status_code == 400


async def test_tools_of_anthropics_servers_are_left_out(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER)
    others = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}, {"type": "mcp_toolset"}]
    assert (await message(server, [USER], tools=[ANTHROPIC, *others])).status_code == 200
    assert "web_search" not in prompt_of(server)
    assert "get_weather" in prompt_of(server)
    ignored = {"mcp_servers": [{"name": "x"}], "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "container": "c"}
    assert (await message(server, [USER], **ignored)).status_code == 200


@pytest.mark.parametrize(
    "tool", [FLAT, {**ANTHROPIC, "type": "function"}, ANTHROPIC, {"type": "function", "name": "get_weather", "parameters": None}]
)
@pytest.mark.parametrize("choice", ["auto", "any", {"type": "function", "name": "get_weather"}, {"type": "tool", "name": "get_weather"}])
async def test_flat_functions_are_read_by_the_chat_route(start_server: StartServer, tool: dict[str, Any], choice: Any) -> None:
    server = await started(start_server, CALL)
    response = await server.chat(tools=[tool], tool_choice=choice)
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_of_responses_is_called_with_its_text(start_server: StartServer, stream: bool) -> None:
    server = await started(start_server, PATCH_CALL)
    response = await respond(server, tools=[FLAT, PATCH], stream=stream)
    if stream:
        events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:")]
        [item] = events[-1]["response"]["output"]
        texts = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
        assert "".join(texts) == done["input"] == "*** Begin\n+ä"
    else:
        [item] = response.json()["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == ("custom_tool_call", "patch", "*** Begin\n+ä", "completed")
    assert "S: /x/" in prompt_of(server)
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    del item["id"], item["status"]
    assert (await respond(server, input=[USER, item, output], tools=[PATCH])).status_code == 200
    assert 'patch:{"input": "*** Begin\\n+ä"}</tool_call>' in prompt_of(server)
    assert "<|start|>tool\ndone" in prompt_of(server)


async def test_a_custom_tool_of_chat_is_a_function_of_one_text(start_server: StartServer) -> None:
    server = await started(start_server, PATCH_CALL)
    tools = [TOOL, {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}]
    for choice in ("auto", {"type": "custom", "custom": {"name": "patch"}}, {"type": "custom", "name": "patch"}):
        [call] = (await server.chat(tools=tools, tool_choice=choice)).json()["choices"][0]["message"]["tool_calls"]
        assert (call["type"], json.loads(call["function"]["arguments"])) == ("function", {"input": "*** Begin\n+ä"})
    own = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [own]}, {"role": "tool", "tool_call_id": "1", "content": "ok"}]
    assert (await server.chat(messages=history, tools=tools)).status_code == 200
    assert 'patch:{"input": "x"}' in prompt_of(server)


async def test_functions_of_a_namespace_are_called_by_their_own_names(start_server: StartServer) -> None:
    server = await started(start_server, CALL.replace("get_weather", "mcp__sky__get_weather"))
    tools = [{"type": "namespace", "name": "mcp__sky__", "description": "", "tools": [FLAT]}]
    response = await respond(server, tools=tools, stream=True)
    events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:")]
    [item] = output_of(events)
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__sky__", "get_weather")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    assert (await respond(server, input=[USER, item, output], tools=tools)).status_code == 200
    assert "<tool_call>mcp__sky__get_weather:" in prompt_of(server)


# Systems in between


STRICT = (  # of templates that print a first system message only, and want roles to alternate
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
DROPS = "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}] {{ m.content }}\n{% endif %}{% endfor %}"
TAKES = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("template", [STRICT, DROPS])
async def test_late_instructions_become_text_of_the_user_where_the_template_takes_no_other(
    start_server: StartServer, template: str, role: str
) -> None:
    server = await start_server(chat_template=template)
    talk = [
        {"role": "system", "content": "A"},
        {"role": role, "content": "B"},
        USER,
        {"role": "assistant", "content": "Yes."},
        {"role": role, "content": "C"},
        {"role": "user", "content": "More."},
        {"role": role, "content": "D"},
    ]
    assert (await server.chat(messages=talk)).status_code == 200
    expected = "[system] A\n\nB\n[user] Hi\n[assistant] Yes.\n[user] C\n\nMore.\n\nD\n"
    assert prompt_of(server) == expected
    items = [{"type": "message", **item} for item in talk]
    assert (await respond(server, input=items)).status_code == 200
    assert prompt_of(server) == expected
    assert (await message(server, talk[1:], system="A")).status_code == 200
    assert prompt_of(server) == expected.replace("A\n\nB", "A\nB")


async def test_late_instructions_stay_where_the_template_takes_them(start_server: StartServer) -> None:
    server = await start_server(chat_template=TAKES)
    talk = [USER, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": [{"type": "text", "text": "C"}]}, USER]
    assert (await message(server, talk)).status_code == 200
    assert prompt_of(server) == "[user] Hi\n[assistant] Yes.\n[system] C\n[user] Hi\n"
    counted = await server.http.post("/v1/messages/count_tokens", json={"messages": talk})
    assert counted.json()["input_tokens"] == len(server.engine.requests[-1].prompt_token_ids)


async def test_the_billing_line_at_the_head_is_dropped(start_server: StartServer) -> None:
    server = await start_server(chat_template=TAKES)
    line = "x-anthropic-billing-header: cc_version=2.1.99.abc; cc_entrypoint=cli; cch=00000;"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "You help."}]
    for system in (blocks, f"{line}\nYou help.", f"\n{line}\n\nYou help."):
        await message(server, [USER], system=system)
        assert prompt_of(server) == "[system] You help.\n[user] Hi\n"
        await server.chat(messages=[{"role": "system", "content": system}, USER])
        assert prompt_of(server) == "[system] You help.\n[user] Hi\n"
    await message(server, [USER], system=f"You help.\n{line}")
    assert line in prompt_of(server)
    await message(server, [USER], system=line)
    assert prompt_of(server) == "[user] Hi\n"


# Parts


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (PICTURE, "[image omitted: this model reads text]"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}, "[document omitted: "),
        ({"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}, "T\nhello"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "hello"}]}}, "hello"),
        ({"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "aGVsbG8="}}, "hello"),
        ({"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "hello"}]}, "t\ns\nhello"),
        ({"type": "tool_reference", "tool_name": "Read"}, "[tool: Read]"),
        ({"type": "resource", "resource": {"uri": "file:///a", "text": "hello"}}, "hello"),
        ({"type": "of next year", "text": "hello"}, "hello"),
        ({"type": "of next year", "n": 1}, '{"type": "of next year", "n": 1}'),
        ({"type": ["of next year"]}, '[{"type": ["of next year"]}]'),
        ({"id": 1, "price": 3}, '[{"id": 1, "price": 3}]'),
    ],
)
async def test_what_tools_return_becomes_text(start_server: StartServer, part: dict[str, Any], text: str) -> None:
    server = await started(start_server, ANSWER)
    call = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [part]}
    talk = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert (await message(server, talk)).status_code == 200
    assert f"<|start|>tool\n{text}" in prompt_of(server)
    function = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": [part]}
    assert (await respond(server, input=[USER, function, output])).status_code == 200
    assert f"<|start|>tool\n{text}" in prompt_of(server)
    assert (await server.chat(messages=[USER, {"role": "tool", "tool_call_id": "1", "content": [part]}, USER])).status_code == 200
    assert f"<|start|>tool\n{text}" in prompt_of(server)


@pytest.mark.parametrize(
    "part",
    [
        PICTURE,
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}},
        {"type": "input_audio", "input_audio": {"data": "x"}},
        {"type": "input_file", "file_id": "x"},
        {"type": "document", "source": {"type": "url", "url": "http://a"}},
        {"type": "hologram", "url": "http://a"},
    ],
)
async def test_a_users_own_media_stay_an_error(start_server: StartServer, part: dict[str, Any]) -> None:
    server = await started(start_server, ANSWER)
    talk = [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}]
    for response in (await message(server, talk), await server.chat(messages=talk), await respond(server, input=talk)):
        assert response.status_code == 400
        assert f"[0].content[1] has the type {part['type']!r}" in response.json()["error"]["message"]


async def test_a_users_documents_of_text_are_read(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER)
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}}
    attached = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}
    await message(server, [{"role": "user", "content": [document]}])
    assert "<|start|>user\nhello<|end|>" in prompt_of(server)
    await server.chat(messages=[{"role": "user", "content": [file]}])
    assert "<|start|>user\nhello<|end|>" in prompt_of(server)
    await respond(server, input=[{"role": "user", "content": [attached]}])
    assert "<|start|>user\nhello<|end|>" in prompt_of(server)


# Histories


@pytest.mark.parametrize("arguments", ['{"city": "Zü', "", "none", "[1]", '"x"', "null", "NaN", "[" * 1500, None, {"city": "Zürich"}, [1]])
@pytest.mark.parametrize(
    "template", [TEMPLATE, TEMPLATE.replace("c.function.name + ':' + c.function.arguments", "c.function.arguments | tojson")]
)
async def test_a_call_in_the_history_is_never_refused(start_server: StartServer, arguments: Any, template: str) -> None:
    server = await started(start_server, ANSWER, chat_template=template)
    shown = {"": "{}", "null": "{}", "[1]": "[1]"}.get(arguments, arguments) if isinstance(arguments, str) else None
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "no"}
    assert (await server.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}, result], tools=[TOOL])).status_code == 200
    if shown is not None and len(shown) < 100:
        assert f"{shown}</tool_call>" in prompt_of(server)
    item = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": arguments, "status": "incomplete"}
    output = {"type": "function_call_output", "call_id": "1", "output": {"ok": False}}
    assert (await respond(server, input=[USER, item, output])).status_code == 200
    assert '<|start|>tool\n{"ok": false}' in prompt_of(server)
    assert "<tool_call>" in prompt_of(server)
    use = {"type": "tool_use", "id": "1", "name": "get_weather", "input": arguments}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": {"ok": False}}]}
    assert (await message(server, [USER, {"role": "assistant", "content": [use]}, answered])).status_code == 200


async def test_items_of_other_types_are_left_out(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER)
    items = [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "of next year", "payload": 5},
    ]
    assert (await respond(server, input=[USER, *items, USER])).status_code == 200
    assert prompt_of(server) == "<|start|>user\nHi<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    shell = {"type": "local_shell_call", "call_id": "1", "status": "completed", "action": {"type": "exec", "command": ["ls"]}}
    output = {"type": "local_shell_call_output", "call_id": "1", "output": "a.txt"}
    assert (await respond(server, input=[USER, shell, output])).status_code == 200
    assert 'local_shell:{"type": "exec", "command": ["ls"]}' in prompt_of(server)
    assert (await respond(server, input=items[:1])).status_code == 400


async def test_calls_that_ran_on_anthropics_servers_stay_in_their_order(start_server: StartServer) -> None:
    server = await started(start_server, ANSWER)
    found = {"type": "web_search_result", "title": "T", "url": "http://a", "encrypted_content": "x"}
    blocks = [
        {"type": "text", "text": "I look."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found]},
        {"type": "text", "text": "It is T.", "citations": [{"type": "x"}]},
    ]
    assert (await message(server, [USER, {"role": "assistant", "content": blocks}, USER])).status_code == 200
    assert (
        '<|start|>assistant\nI look.<tool_call>web_search:{"query": "x"}</tool_call><|end|>\n<|start|>tool\nT\nhttp://a<|end|>\n'
        "<|start|>assistant\nIt is T.<|end|>\n"
    ) in prompt_of(server)


# Sessions


async def test_five_turns_of_codex(start_server: StartServer) -> None:
    server = await started(start_server, CALL)
    others = [PATCH, {"type": "web_search", "external_web_access": False}, {"type": "namespace", "name": "mcp__a", "tools": [FLAT]}]
    fields = {"tools": [FLAT, *others], "tool_choice": "auto", "parallel_tool_calls": False, "store": False, "stream": True}
    fields |= {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "x"}
    items: list[Any] = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]}]
    for turn in range(5):
        items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"Turn {turn}"}]})
        response = await respond(server, input=items, instructions="You code.", **fields)
        assert response.status_code == 200, response.text
        events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:")]
        [call] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        items.append({name: call[name] for name in ("type", "call_id", "name", "arguments")})
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": f"Result {turn}"})
    assert all(f"Result {turn}<|end|>" in prompt_of(server) for turn in range(4))


async def test_five_turns_of_claude_code(start_server: StartServer) -> None:
    server = await started(start_server, CALL)
    system = [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}]
    fields = {"tools": [ANTHROPIC], "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "metadata": {"user_id": "x"}}
    talk: list[Any] = []
    for turn in range(5):
        talk += [{"role": "user", "content": [{"type": "text", "text": f"Turn {turn}"}]}, {"role": "system", "content": "Be brief."}]
        response = await message(server, talk, system=system, **fields)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["stop_reason"] == "tool_use"
        talk.append({"role": "assistant", "content": answer["content"]})
        result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": [PICTURE]}
        talk.append({"role": "user", "content": [result]})
    assert prompt_of(server).count("[image omitted") == 4


@pytest.mark.parametrize("tools", [[TOOL], None])  # Cline calls functions, aider writes its edits as text
async def test_five_turns_of_cline_and_aider(start_server: StartServer, tools: list[Any] | None) -> None:
    server = await started(start_server, CALL if tools else ANSWER)
    talk: list[Any] = [{"role": "system", "content": [{"type": "text", "text": "You code."}]}]
    for turn in range(5):
        talk.append({"role": "user", "content": [{"type": "text", "text": f"Turn {turn}"}]})
        response = await server.chat(messages=talk, tools=tools)
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]
        talk.append(answer)
        talk += [{"role": "tool", "tool_call_id": call["id"], "content": f"Result {turn}"} for call in answer.get("tool_calls", [])]
    assert all(f"Turn {turn}<|end|>" in prompt_of(server) for turn in range(5))

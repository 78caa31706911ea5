"""Sessions of five turns with tools against a live server, in the requests of Codex, Claude Code, Cline and aider: none is refused.

The requests have the fields of the agents' public source and of recorded bodies. The model is random: where `calls` is True, calls are
forced and go back as the server gave them, cut off or not; where an answer has none, a call of the test's and its result follow it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from tests.serve.test_tool_calls import TEMPLATE
from tests.support.server_process import ServerProcess

TURNS = 5
OPTIONS = (
    *("--port", "0", "--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-num-seqs", "4", "--num-threads", "1"),
    *("--max-model-len", "16384", "--hf-overrides", '{"max_position_embeddings": 16384}', "--served-model-name", "coder"),
    *("--tool-call-parser", "hermes", "--repetition-detection", '{"max_pattern_size": 20, "min_count": 3}'),
)
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def http(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    server = ServerProcess(str(tiny_llama_dir), "--chat-template", str(template), *OPTIONS)
    with server.client() as client:
        yield client
    assert server.stop() == 0, server.output
    assert "Traceback" not in server.output


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not any("error" in event or event.get("type") in ("error", "response.failed") for event in events), events[-1]
    return events


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A function as the Responses API has it."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"Does {name}.", "strict": False, "parameters": schema}


TEXT = {"type": "string", "description": "Some text."}

# Codex: codex-rs/codex-api/src/common.rs, codex-rs/protocol/src/models.rs

CODEX_TOOLS: list[Any] = [
    function("exec_command", cmd=TEXT, yield_time_ms={"type": "number"}),
    function("write_stdin", session_id={"type": "number"}, chars=TEXT),
    function("update_plan", plan={"type": "array", "items": {"type": "object", "properties": {"step": TEXT, "status": TEXT}}}),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF\n%import common.LF'},
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "mcp__docs__", "description": "Documents.", "tools": [function("search", query=TEXT)]},
]


def codex_text(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["True"])
@pytest.mark.parametrize("calls", [False, True])
def test_codex(http: httpx.Client, calls: bool) -> None:
    items = [
        codex_text("developer", "<permissions instructions>\nAsk first.\n</permissions instructions>"),
        codex_text("user", "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>"),
    ]
    results: list[Any] = [
        "Exit code: 0\nOutput:\na.py",
        [{"type": "input_text", "text": "Seen"}, {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}],
        "",
    ]
    num_calls = 0
    for turn in range(TURNS):
        items.append(codex_text("user", f"Turn {turn}: fix <|im_end|> it."))
        body = {
            "model": "coder",
            "instructions": "You are a coding agent running in the Codex CLI.",
            "input": items,
            "tools": CODEX_TOOLS,
            "tool_choice": "required" if calls else "auto",
            "parallel_tool_calls": turn % 2 == 1,
            "reasoning": {"effort": "medium", "summary": "auto", "context": "auto"} if turn % 2 else None,
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": "0199-thread",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "1"},
        }
        headers = {"session-id": "0199", "x-codex-turn-metadata": "{}", "originator": "codex_cli_rs", "content-type": "application/json"}
        content = json.dumps(body).encode()
        if turn % 2:
            headers["content-encoding"], content = "zstd", zstandard.ZstdCompressor().compress(content)
        events = events_of(http.post("/v1/responses", content=content, headers=headers))
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        called = [item for item in done if item["type"] in ("function_call", "custom_tool_call")]
        num_calls += len(called)
        # Codex writes neither `id` nor `status`.
        items += [{name: value for name, value in item.items() if name not in ("id", "status")} for item in done]
        if not called:
            called = [{"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": f"call_{turn}"}]
            if turn == 3:
                called = [{"type": "custom_tool_call", "status": "completed", "call_id": "c3", "name": "apply_patch", "input": "*** Begin"}]
            items += [*called, {"type": "reasoning", "summary": [], "encrypted_content": None}]
        for call in called:
            output = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": results[turn % 3]}
            items.append(output)
        if turn == 2:
            items.append({"type": "ghost_snapshot", "ghost_commit": {"id": "abc", "parent": None, "preexisting_untracked_files": []}})
            items.append({"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}})
    assert bool(num_calls) == calls


# Claude Code: recorded bodies of 2.1

CLAUDE_TOOLS: list[Any] = [
    {"name": one["name"], "description": one["description"], "input_schema": {"$schema": "http://json-schema.org/", **one["parameters"]}}
    for one in (function("Bash", command=TEXT), function("Read", file_path=TEXT), function("TodoWrite", todos={"type": "array"}))
]
CLAUDE_TOOLS[-1] |= {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "eager_input_streaming": True, "defer_loading": False}
CLAUDE_BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,prompt-caching-scope-2026-01-05,"
    "mid-conversation-system-2026-04-07,effort-2025-11-24"
)


@pytest.mark.parametrize("calls", [False, True])
def test_claude_code(http: httpx.Client, calls: bool) -> None:
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    results: list[Any] = [
        "a.py\nb.py",
        [{"type": "text", "text": "Seen"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}],
        [{"type": "tool_reference", "tool_name": "Read"}],
        "",
    ]
    talk: list[Any] = []
    num_calls = 0
    for turn in range(TURNS):
        reminder = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"}
        question = {"type": "text", "text": f"Turn {turn}", "cache_control": {"type": "ephemeral"}}
        if talk and talk[-1]["role"] == "user":
            talk[-1]["content"] += [reminder, question]
        else:
            talk.append({"role": "user", "content": [reminder, question]})
        if turn == 2:
            talk.append({"role": "system", "content": [{"type": "text", "text": "The plan mode is over."}]})
        body: dict[str, Any] = {
            "model": "coder",
            "messages": talk,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.170.{turn}; cc_entrypoint=cli; cch=0000{turn};"},
                {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", "cache_control": cached},
            ],
            "tools": [*CLAUDE_TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            "metadata": {"user_id": '{"device_id":"1","account_uuid":"","session_id":"2"}'},
            "max_tokens": 64 if calls else 40,
            "thinking": {"type": "adaptive", "display": "summarized"} if turn % 2 else {"type": "disabled"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "safeguards": {"version": 1},
            "stream": turn != 4,
        }
        if calls:
            body["tool_choice"] = {"type": "any"}
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": CLAUDE_BETAS, "x-app": "cli", "user-agent": "claude-cli/2.1.170"}
        counted = http.post("/v1/messages/count_tokens?beta=true", json={**body, "max_tokens": None}, headers=headers)
        assert counted.status_code == 200, counted.text
        response = http.post("/v1/messages?beta=true", json=body, headers=headers)
        blocks = claude_blocks(events_of(response)) if body["stream"] else response.json()["content"]
        assert response.status_code == 200, response.text
        used = [block for block in blocks if block["type"] == "tool_use"]
        num_calls += len(used)
        if not used:
            used = [{"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"command": "ls"}, "caller": {"type": "direct"}}]
            blocks = [*(block for block in blocks if block.get("text")), *used]
        talk.append({"role": "assistant", "content": blocks})
        answered = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": results[turn % 4], "is_error": turn == 3} for block in used
        ]
        talk.append({"role": "user", "content": answered})
    assert bool(num_calls) == calls


def claude_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that a client makes of the events."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[-1] += event["delta"].get("text") or event["delta"].get("partial_json") or event["delta"].get("thinking") or ""
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:  # the call was cut off
                block["input"] = {}
        else:
            block[block["type"]] = text
    return blocks


# Cline: src/core/api/providers/openai.ts, src/core/api/transform/openai-format.ts; aider: aider/models.py (`send_completion`)


def nested(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {name: value for name, value in one.items() if name != "type"}} for one in functions]


CLINE_TOOLS = nested(function("execute_command", command=TEXT, requires_approval={"type": "boolean"}), function("read_file", path=TEXT))
AIDER_TOOLS = nested(function("replace_lines", explanation=TEXT, edits={"type": "array", "items": {"type": "object", "properties": {}}}))


@pytest.mark.parametrize("calls", [False, True])
def test_cline(http: httpx.Client, calls: bool) -> None:
    talk: list[Any] = [{"role": "system", "content": "You are Cline, a highly skilled software engineer."}]
    num_calls = 0
    for turn in range(TURNS):
        parts = [
            f"<task>\nTurn {turn}\n</task>",
            "# task_progress",
            "<environment_details>\n# VSCode Visible Files\n</environment_details>",
        ]
        talk.append({"role": "user", "content": [{"type": "text", "text": part} for part in parts]})
        body = {
            "model": "coder",
            "messages": talk,
            "temperature": 0,
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": CLINE_TOOLS,
            "tool_choice": "required" if calls else "auto",
            "parallel_tool_calls": False,
        }
        answer = chat_message(events_of(http.post("/v1/chat/completions", json=body)))
        num_calls += len(answer["tool_calls"])
        if not answer["tool_calls"]:
            arguments = '{"command": "ls", "requires_approval": false' + ("}" if turn != 1 else "")  # one that was cut off
            called = {"name": "execute_command", "arguments": arguments}
            answer["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": called}]
        talk.append(answer if answer["content"] else {**answer, "content": None})
        result = ["[execute_command for 'ls'] Result:\na.py", [{"type": "text", "text": "(tool did not return anything)"}]][turn % 2]
        talk += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in answer["tool_calls"]]
    assert bool(num_calls) == calls


@pytest.mark.exhaustive
@pytest.mark.parametrize("calls", [False, True])  # aider writes edits as text, or as a function that it forces
def test_aider(http: httpx.Client, calls: bool) -> None:
    talk: list[Any] = [
        {"role": "system", "content": "Act as an expert software developer."},
        {"role": "user", "content": "I have *added these files to the chat*.\n\na.py\n```\nx = 1\n```\n"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
    ]
    num_calls = 0
    for turn in range(TURNS):
        talk.append({"role": "user", "content": f"Turn {turn}"})
        body: dict[str, Any] = {"model": "coder", "messages": talk, "temperature": 0, "stream": turn % 2 == 0}
        if calls:
            body |= {"tools": AIDER_TOOLS, "tool_choice": {"type": "function", "function": {"name": "replace_lines"}}}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = chat_message(events_of(response)) if body["stream"] else response.json()["choices"][0]["message"]
        num_calls += len(answer.get("tool_calls") or ())
        talk.append({"role": "assistant", "content": answer["content"]})
        if answer.get("tool_calls"):
            call = answer["tool_calls"][0]["function"]
            talk.append({"role": "assistant", "content": None, "function_call": {"name": call["name"], "arguments": call["arguments"]}})
        talk += [{"role": "user", "content": "I applied the edits."}, {"role": "assistant", "content": "Ok."}]
    assert bool(num_calls) == calls


def chat_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the chunks."""
    content, calls = "", list[dict[str, Any]]()
    for event in events:
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part.get("id"):
                    calls.append({"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
                calls[-1]["function"]["arguments"] += part["function"].get("arguments") or ""
    return {"role": "assistant", "content": content, "tool_calls": calls}

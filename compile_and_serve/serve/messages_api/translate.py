"""Anthropic's requests as chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from compile_and_serve.serve.errors import MAX_ECHO, ApiError, renamed_params, require_text
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.client_parts import content_text, part_text, warn_once, without_billing_line
from compile_and_serve.serve.protocol.client_tools import leave_out_tool
from compile_and_serve.serve.protocol.fields import SamplingFields, check_fields
from compile_and_serve.serve.protocol.messages_api import MessagesRequest, PromptFields

# Chat's name of a field → Anthropic's.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "structured_outputs": "output_config.format",
}
_TEXTS = {".function.parameters": ".input_schema", ".function.name": ".name"}
# Field → why it has no effect here.
_IGNORED = {
    "container": "this server runs no code",
    "mcp_servers": "this server calls no tools itself",
    "context_management": "this server does not edit conversations",
}


def own_names() -> AbstractContextManager[None]:
    """Name the fields in errors of the chat pipeline as Anthropic does."""
    return renamed_params(_NAMES, _TEXTS)


def chat_request(body: MessagesRequest, *, reasons: bool) -> ChatCompletionRequest:
    """The chat request of a message request. reasons: whether reasoning can be told from the answer. Raises a 400."""
    check_fields(body)
    for name, reason in _IGNORED.items():
        if getattr(body, name):
            warn_once(f"Requests contain {name}, which has no effect: {reason}.")
    fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
    fields |= _prompt_fields(body)
    fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "response_format": _response_format(body)}
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None and body.thinking.type == "enabled":
        if reasons:
            fields["thinking_token_budget"] = body.thinking.budget_tokens
        else:
            warn_once("Requests contain thinking.budget_tokens, which has no effect without a reasoning parser (--reasoning-parser).")
    return ChatCompletionRequest.model_construct(**fields)


def prompt_request(body: PromptFields) -> ChatCompletionRequest:
    """A chat request with the same prompt. Raises a 400."""
    check_fields(body)
    return ChatCompletionRequest.model_construct(model=body.model, **_prompt_fields(body))


def wants_thinking(body: PromptFields) -> bool:
    """Whether the answer may have thinking blocks."""
    return body.thinking is not None and body.thinking.type != "disabled"


def _prompt_fields(body: PromptFields) -> dict[str, Any]:
    messages = _messages(body)
    continues = messages[-1]["role"] == "assistant"
    choice = body.tool_choice
    return {
        "messages": messages,
        "continue_final_message": continues,
        "tools": _tools(body.tools),
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "chat_template_kwargs": {"enable_thinking": wants_thinking(body), **(body.chat_template_kwargs or {})},
    }


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools of the client. Those that Anthropic's servers run, or whose schemas only Anthropic's models know, are left out."""
    if tools is None:
        return None
    kept = []
    for index, tool in enumerate(tools):
        if tool.get("type") in (None, "custom", "function") or isinstance(tool.get("input_schema"), Mapping):
            kept.append(_tool(tool, f"tools[{index}]"))
        else:
            leave_out_tool(tool)
    return kept


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = require_text(tool.get("name"), f"{where}.name")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise ApiError(400, f"{where}.input_schema must be a JSON schema, which is an object.", "tools")
    function = {"name": name, "parameters": tool["input_schema"], "strict": tool.get("strict") is True}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(body: PromptFields) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise ApiError(400, "tool_choice of the type tool needs a name.", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(body: MessagesRequest) -> dict[str, Any] | None:
    given = None if body.output_config is None else body.output_config.format
    given = body.output_format if given is None else given
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        sentence = "output_config.format must be {'type': 'json_schema', 'schema': {…}}."
        raise ApiError(400, sentence, "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _messages(body: PromptFields) -> list[dict[str, Any]]:
    runs: list[list[dict[str, Any]]] = []  # each becomes one message
    if body.system and (system := without_billing_line(content_text(body.system, "system", own=True))):
        runs.append([{"role": "system", "content": system}])
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            raise ApiError(400, f"{where}.role must be user, assistant or system, got {role!r:.{MAX_ECHO}}.", "messages")
        where = f"{where}.content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise ApiError(400, f"{where} must be a text or a list of blocks.", "messages")
        if role == "user":
            new = _user(blocks, where, names)
        elif role == "assistant":
            new = _assistant(blocks, where, names)
        else:
            new = [{"role": "system", "content": without_billing_line(content_text(blocks, where, own=True))}]
        if runs and runs[-1][-1]["role"] == new[0]["role"] and new[0]["role"] != "tool":
            runs[-1].append(new.pop(0))
        runs += [[message] for message in new]
    return [_joined(run) for run in runs]


def _joined(run: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One message of consecutive ones of a role, because many chat templates demand that the roles alternate."""
    if len(run) == 1:
        return run[0]
    joined = {"role": run[0]["role"], "content": ""}
    for name in ("content", "reasoning"):
        if texts := [message[name] for message in run if message.get(name)]:
            joined[name] = "\n".join(texts)
    if calls := [call for message in run for call in message.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _user(blocks: Sequence[Mapping[str, Any]], where: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The results of tools, and the user's own message if there is one."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if _is_result(block):
            results.append(_result(block, f"{where}[{index}]", names))
        elif (text := part_text(block, f"{where}[{index}]", own=True)) is not None:
            texts.append(text)
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _is_result(block: Mapping[str, Any]) -> bool:
    """Whether a block has what a tool returned: of the client, or of Anthropic's servers in a conversation that went on there."""
    kind = block.get("type")
    return isinstance(kind, str) and kind.endswith("tool_result")


def _result(block: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    call = require_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    text = content_text(block.get("content"), f"{where}.content", own=False)
    text = f"Error: {text}" if block.get("is_error") is True else text
    return {"role": "tool", "tool_call_id": call, "content": text, "name": names.get(call, "")}


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The assistant's messages: one, and one more after each result of a tool that ran on Anthropic's servers."""
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for index, block in enumerate(blocks):
        kind = block.get("type")
        message = messages[-1]
        if _is_result(block):
            messages.append(_result(block, f"{where}[{index}]", names))
            continue
        if message["role"] != "assistant":
            message = {"role": "assistant", "content": ""}
            messages.append(message)
        if kind == "thinking":
            thought = block.get("thinking")
            message["reasoning"] = message.get("reasoning", "") + (thought if isinstance(thought, str) else "")
        elif isinstance(kind, str) and kind.endswith("tool_use"):
            call_id = require_text(block.get("id"), f"{where}[{index}].id")
            name = require_text(block.get("name"), f"{where}[{index}].name")
            names[call_id] = name
            function = {"name": name, "arguments": _arguments(block.get("input"))}
            message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking" and (text := part_text(block, f"{where}[{index}]", own=False)) is not None:
            message["content"] += text
    return messages


def _arguments(given: Any) -> str:
    """The arguments of a call, which a model may have written, so that they may be anything."""
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)

"""Anthropic's requests as chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from compile_and_serve.serve.errors import MAX_ECHO, ApiError, renamed_params, require_text
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
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
_REFUSED = {
    "container": "This server runs no code: container must be null.",
    "mcp_servers": "This server calls no tools itself: mcp_servers must be empty.",
    "context_management": "This server does not edit conversations: context_management must be null.",
}


def own_names() -> AbstractContextManager[None]:
    """Name the fields in errors of the chat pipeline as Anthropic does."""
    return renamed_params(_NAMES, _TEXTS)


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """The chat request of a message request. Raises a 400."""
    check_fields(body)
    for name, sentence in _REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, sentence, name)
    fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
    fields |= _prompt_fields(body)
    fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "response_format": _response_format(body)}
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
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
        "tools": None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "chat_template_kwargs": {"enable_thinking": wants_thinking(body), **(body.chat_template_kwargs or {})},
    }


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        sentence = f"{where} has the type {kind!r:.{MAX_ECHO}}, but this server only supports tools of the client."
        raise ApiError(400, sentence, "tools")
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
    if body.system:
        runs.append([{"role": "system", "content": _text(body.system, "system")}])
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise ApiError(400, f"{where}.role must be user or assistant, got {role!r:.{MAX_ECHO}}.", "messages")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise ApiError(400, f"{where}.content must be a text or a list of blocks.", "messages")
        if role == "user":
            new = _user(blocks, f"{where}.content", names)
        else:
            new = [_assistant(blocks, f"{where}.content", names)]
        if runs and runs[-1][-1]["role"] == new[0]["role"] == role:
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
        if block.get("type") == "tool_result":
            call = require_text(block.get("tool_use_id"), f"{where}[{index}].tool_use_id")
            text = _text(block.get("content") or "", f"{where}[{index}].content")
            text = f"Error: {text}" if block.get("is_error") is True else text
            results.append({"role": "tool", "tool_call_id": call, "content": text, "name": names.get(call, "")})
        else:
            texts.append(_block_text(block, f"{where}[{index}]"))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str, names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(require_text(block.get("thinking"), f"{where}[{index}].thinking"))
        elif kind == "tool_use":
            call_id = require_text(block.get("id"), f"{where}[{index}].id")
            name = require_text(block.get("name"), f"{where}[{index}].name")
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise ApiError(400, f"{where}[{index}].input must be an object.", "messages")
            names[call_id] = name
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, f"{where}[{index}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ApiError(400, f"{where} must be a text or a list of blocks.", where.partition("[")[0])
    return "\n".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block_text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        sentence = f"{where} has the type {block.get('type')!r:.{MAX_ECHO}}, which is not supported here: this model reads text."
        raise ApiError(400, sentence, where.partition("[")[0])
    return require_text(block.get("text"), f"{where}.text")

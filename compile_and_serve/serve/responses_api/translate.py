"""Requests of OpenAI's Responses API as chat requests."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from compile_and_serve.serve.errors import MAX_ECHO, ApiError, renamed_params, require_text
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.fields import SamplingFields, check_fields
from compile_and_serve.serve.protocol.responses_api import ResponsesRequest

# Chat's name of a field → its name here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format",
    "structured_outputs": "text.format",
}
_TEXTS = {".function.parameters": ".parameters", ".function.name": ".name", "lower max_tokens": "lower max_output_tokens"}
_REFUSED = {
    "conversation": "This server keeps no conversations: use previous_response_id.",
    "prompt": "This server keeps no prompt templates: send the text in input.",
    "context_management": "This server does not edit conversations: context_management must be null.",
}
_LOGPROBS = "message.output_text.logprobs"


def own_names() -> AbstractContextManager[None]:
    """Name the fields in errors of the chat pipeline as the Responses API does."""
    return renamed_params(_NAMES, _TEXTS)


def check(body: ResponsesRequest) -> None:
    """Raise a 400 for a field that this server cannot honour."""
    check_fields(body)
    for name, sentence in _REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, sentence, name)
    if body.background and body.stream:
        raise ApiError(400, "A background response cannot be streamed: set one of the two to false.", "background")


def chat_request(body: ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> ChatCompletionRequest:
    """The chat request. items: the whole conversation. Raises a 400."""
    fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
    tools = None if body.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    tools, choice = _tool_choice(body.tool_choice, tools)
    fields |= {
        "messages": _messages(items, body.instructions),
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "response_format": _response_format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "thinking_token_budget": body.thinking_token_budget,
        "logprobs": _LOGPROBS in (body.include or ()),
        "top_logprobs": body.top_logprobs if _LOGPROBS in (body.include or ()) else None,
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
    }
    return ChatCompletionRequest.model_construct(**fields)


def new_id(prefix: str) -> str:
    """A new id of an object of the API."""
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The request's input as items, each with an id and a type."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for item in given:
        kind = item.get("type") or ("message" if "role" in item else None)
        complete = {**item, "type": kind}
        if not isinstance(complete.get("id"), str):
            complete["id"] = new_id("msg" if kind == "message" else "item")
        if kind == "message":
            complete.setdefault("status", "completed")
            if isinstance(item.get("content"), str):
                part = "output_text" if item.get("role") == "assistant" else "input_text"
                complete["content"] = [{"type": part, "text": item["content"]}]
        items.append(complete)
    return items


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        sentence = f"{where} has the type {kind!r:.{MAX_ECHO}}, but this server only supports tools of the type function."
        raise ApiError(400, sentence, "tools")
    require_text(tool.get("name"), f"{where}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(
    choice: str | Mapping[str, Any] | None, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The tools that the model sees, and chat's tool_choice."""
    if choice is None or isinstance(choice, str):
        return tools, choice
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return tools, {"type": "function", "function": {"name": choice["name"]}}
    allowed = choice.get("tools")
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required") and isinstance(allowed, list):
        # str, because a wrong name may be of any type.
        names = {str(tool.get("name")) if isinstance(tool, Mapping) else "" for tool in allowed}
        kept = [tool for tool in tools or () if tool["function"]["name"] in names]
        if names - {tool["function"]["name"] for tool in kept}:
            raise ApiError(400, "tool_choice.tools contains a tool that is not one of the tools.", "tool_choice")
        return kept, choice["mode"]
    sentence = (
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'name': …} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': […]}."
    )
    raise ApiError(400, sentence, "tool_choice")


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    given = None if body.text is None else body.text.format
    if given is None:
        return None
    kind = given.get("type")
    if kind == "json_schema":
        if not isinstance(given.get("schema"), dict):
            raise ApiError(400, "text.format.schema must be a JSON schema.", "text.format")
        return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
    if kind not in ("text", "json_object"):
        raise ApiError(400, "text.format.type must be text, json_object or json_schema.", "text.format")
    return {"type": kind}


def _messages(items: Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    if not items:
        raise ApiError(400, "input must have at least one item.", "input")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.get("type"):
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                _assistant(messages)["reasoning"] = _reasoning(item, where)
            case "function_call" if item.get("status") == "incomplete":
                continue  # cut off or malformed
            case "function_call":
                call = {name: require_text(item.get(name), f"{where}.{name}") for name in ("call_id", "name", "arguments")}
                _check_arguments(call["arguments"], f"{where}.arguments")
                names[call["call_id"]] = call["name"]
                function = {"name": call["name"], "arguments": call["arguments"]}
                calls = _assistant(messages).setdefault("tool_calls", [])
                calls.append({"id": call["call_id"], "type": "function", "function": function})
            case "function_call_output":
                call_id = require_text(item.get("call_id"), f"{where}.call_id")
                message = {"role": "tool", "tool_call_id": call_id, "name": names.get(call_id, "")}
                messages.append({**message, "content": _content(item.get("output"), f"{where}.output")})
            case kind:
                sentence = (
                    f"{where} has the type {kind!r:.{MAX_ECHO}}, which is not supported: send items of the types message, "
                    "reasoning, function_call and function_call_output."
                )
                raise ApiError(400, sentence, "input")
    if instructions:
        _instruct(messages, instructions)
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        sentence = f"{where}.role must be user, assistant, system or developer, got {role!r:.{MAX_ECHO}}."
        raise ApiError(400, sentence, "input")
    content = _content(content, f"{where}.content")
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    message = _assistant(messages)
    if message["content"] or "tool_calls" in message:  # calls follow the text in a message of the chat template
        message = {"role": "assistant", "content": ""}
        messages.append(message)
    message["content"] = content


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end of the conversation, which reasoning, text and calls in a row share."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any, where: str) -> str | list[Any]:
    """The text or text parts of an item, checked."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise ApiError(400, f"{where} must be a text or a list of parts.", "input")
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            sentence = f"{where}[{index}] has the type {kind!r:.{MAX_ECHO}}, but this model only reads text."
            raise ApiError(400, sentence, "input")
        name = "refusal" if kind == "refusal" else "text"
        require_text(part.get(name), f"{where}[{index}].{name}")
    return content


def _check_arguments(arguments: str, where: str) -> None:
    try:
        # Checked without decoding, which would hold up the event loop for a long text.
        msgspec.json.decode(arguments or "{}", type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        raise ApiError(400, f"{where} must be JSON text.", "input") from None


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or ()
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
        raise ApiError(400, f"{where}.content must be a list of parts.", "input")
    return "".join(require_text(part.get("text"), f"{where}.content.text") for part in parts)


def _instruct(messages: list[dict[str, Any]], instructions: str) -> None:
    """Begin with the instructions. A system message at the beginning follows them, as templates accept only one."""
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": instructions})
    elif isinstance(first["content"], str):
        first["content"] = f"{instructions}\n\n{first['content']}"
    else:
        first["content"] = [{"type": "text", "text": instructions}, *first["content"]]

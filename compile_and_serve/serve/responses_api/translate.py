"""Requests of OpenAI's Responses API as chat requests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from compile_and_serve.runtime.media.sources import TakenMedia
from compile_and_serve.serve.errors import MAX_ECHO, ApiError, renamed_params, require_text
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.client_parts import content_text, custom_arguments, texts_of, warn_once
from compile_and_serve.serve.protocol.client_tools import function_choice, function_tools, in_namespace
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
}
STORE_FLAG = "start the server with --response-store"
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
    if body.context_management:
        warn_once("Requests contain context_management, which has no effect: this server does not edit conversations.")
    if body.background and body.stream:
        raise ApiError(400, "A background response cannot be streamed: set one of the two to false.", "background")


def chat_request(body: ResponsesRequest, items: Sequence[Mapping[str, Any]]) -> ChatCompletionRequest:
    """The chat request. items: the whole conversation. Raises a 400."""
    fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
    tools, choice = _tool_choice(body.tool_choice, function_tools(body.tools))
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


Take = Callable[[Any, str], tuple[Any, TakenMedia | None]]  # `MediaWork.take`


def chat_of_input(body: ChatCompletionRequest, take: Take) -> ChatCompletionRequest:
    """A chat request whose conversation is in the form of the Responses API, as Cursor sends it to the chat route. Raises a 400."""
    given = {**body.model_dump(exclude_unset=True), **(body.model_extra or {})}
    try:
        response = ResponsesRequest.model_validate({name: given[name] for name in given if name in ResponsesRequest.model_fields})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    with own_names():
        items, taken = take(input_items(response.input), "input")
        chat = chat_request(response, items).with_media(taken)
    own = {name: given[name] for name in body.model_fields_set if name not in ResponsesRequest.model_fields and name != "messages"}
    return chat.model_copy(update={**own, "stream": body.stream, "stream_options": body.stream_options})


def new_id(prefix: str) -> str:
    """A new id of an object of the API."""
    return f"{prefix}_{uuid.uuid4().hex}"


def referenced_ids(given: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """The ids of the stored items that the input refers to."""
    return [] if isinstance(given, str) else [str(item.get("id")) for item in given if _is_reference(item)]


def input_items(
    given: str | Sequence[Mapping[str, Any]], known: Mapping[str, dict[str, Any]] | None = None, *, stores: bool = False
) -> list[dict[str, Any]]:
    """The request's input as items, each with an id and a type. Raises a 400.

    known: stored items by id, in place of references to them. stores: whether the server stores responses, for errors.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for index, item in enumerate(given):
        if _is_reference(item):
            stored = (known or {}).get(str(item.get("id")))
            if stored is None:
                reason = "which is not stored" if stores else f"but this server stores none: {STORE_FLAG}"
                advice = f"input[{index}] refers to the item {item.get('id')!r:.{MAX_ECHO}}, {reason}, or send the item itself."
                raise ApiError(400, advice, "input")
            items.append(stored)
            continue
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


def _tool_choice(
    choice: str | Mapping[str, Any] | None, tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The tools that the model sees, and chat's tool_choice."""
    kept, read = function_choice(choice, tools)
    if read is None or isinstance(read, str) or isinstance(read.get("function"), Mapping):
        return kept, read
    if read.get("type") == "allowed_tools" and read.get("mode") in ("auto", "required") and isinstance(read.get("tools"), list):
        raise ApiError(400, "tool_choice.tools contains a tool that is not one of the tools.", "tool_choice")
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
    answered = {str(item.get("call_id")) for item in items if _is_output(item)}
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type")
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "reasoning":
            if text := _reasoning(item):
                _assistant(messages)["reasoning"] = text
        elif _is_output(item):
            call_id = require_text(item.get("call_id"), f"{where}.call_id")
            content = content_text(item["output"], f"{where}.output", own=False)
            messages.append({"role": "tool", "tool_call_id": call_id, "name": names.get(call_id, ""), "content": content})
        elif _is_call(item):
            call_id = item["call_id"]
            if item.get("status") == "incomplete" and call_id not in answered:
                continue  # cut off or malformed
            names[call_id] = _called_name(item, where)
            function = {"name": names[call_id], "arguments": _arguments(item)}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind in ("function_call", "custom_tool_call"):
            raise ApiError(400, f"{where}.call_id must be a text.", "input")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            raise ApiError(400, f"{where}.output is missing.", "input")
        elif not isinstance(kind, str):
            raise ApiError(400, f"{where} has the type {kind!r:.{MAX_ECHO}}: send the item itself, with its type.", "input")
        else:
            warn_once(f"Requests contain items of the type {kind!r:.{MAX_ECHO}}, which are left out.")
    if not messages:
        raise ApiError(400, "input must have at least one item that the model can read.", "input")
    if instructions:
        _instruct(messages, instructions)
    return messages


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        sentence = f"{where}.role must be user, assistant, system or developer, got {role!r:.{MAX_ECHO}}."
        raise ApiError(400, sentence, "input")
    if role == "assistant" and content is None:
        content = ""
    if not isinstance(content, str):
        texts = texts_of(content, f"{where}.content", own=role != "assistant")
        content = [{"type": "text", "text": text} for text in texts]
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


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item stands for a stored one. Its type may be left out."""
    return item.get("type") == "item_reference" or (item.get("type") is None and item.keys() - {"type"} == {"id"})


def _is_output(item: Mapping[str, Any]) -> bool:
    """Whether an item has what a tool returned: of a function, a custom tool or any other that the client ran."""
    kind = item.get("type")
    return isinstance(kind, str) and kind.endswith("_output") and "output" in item


def _called_name(item: Mapping[str, Any], where: str) -> str:
    """The name of a call's tool. Calls of OpenAI's own tools, such as local_shell_call, have none but their type's."""
    name = item.get("name", item["type"].removesuffix("_call"))
    return in_namespace(item.get("namespace"), require_text(name, f"{where}.name"))


def _is_call(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return isinstance(kind, str) and kind.endswith("_call") and isinstance(item.get("call_id"), str)


def _arguments(item: Mapping[str, Any]) -> str:
    """The arguments of a call as the model wrote them, which may be cut off."""
    if item["type"] == "custom_tool_call":
        return custom_arguments(item.get("input"))
    arguments = item.get("arguments", item.get("action"))
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item. One whose content is encrypted has none; its summary is not what the model wrote."""
    return "".join(texts_of(item.get("content"), "content", own=False))


def _instruct(messages: list[dict[str, Any]], instructions: str) -> None:
    """Begin with the instructions. A system message at the beginning follows them, as templates accept only one."""
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": instructions})
    elif isinstance(first["content"], str):
        first["content"] = f"{instructions}\n\n{first['content']}"
    else:
        first["content"] = [{"type": "text", "text": instructions}, *first["content"]]

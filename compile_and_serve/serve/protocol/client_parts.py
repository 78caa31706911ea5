"""Parts of messages that this server cannot read: they become text or are left out, and the log says so once for each kind.

What a client itself asks about stays an error: without a user's own image, the request would mean something else. What tools returned
and what models wrote is never refused, because the conversation could not go on.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compile_and_serve.serve.errors import MAX_ECHO, ApiError, require_text

logger = logging.getLogger(__name__)

_TEXT_KINDS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
# What a model of text cannot read: known by the type's name, or by a field that holds data or says where it lies.
_MEDIA_KIND = re.compile(r"image|audio|video|file|document|pdf|screenshot|upload")
_MEDIA_FIELDS = frozenset({"source", "data", "url", "file_id", "file_data", "image_url", "file_url", "audio_url", "video_url"})
_BILLING_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(\n|$)\s*", re.IGNORECASE)
_DATA_URL = re.compile(r"data:text/[^,]*;base64,")
_MAX_WARNED = 1000
CUSTOM_ARGUMENT = "input"  # the only argument of a function that stands for a custom tool

_warned: set[str] = set()  # sentences that this process has logged


def warn_once(sentence: str) -> None:
    """Log what a request loses, once in this process."""
    if sentence not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(sentence)
        logger.warning(sentence)


def without_billing_line(text: str) -> str:
    """A system prompt without the line at its head that Claude Code writes for its own service.

    The line changes with every request, so that no prefix of the prompt would be found in the cache.
    """
    return _BILLING_LINE.sub("", text, count=1) if _BILLING_LINE.match(text) else text


def content_text(content: Any, where: str, *, own: bool) -> str:
    """The text of a message's content, a text or a list of parts. See `part_text`; parts of text are joined by line breaks."""
    return "\n".join(texts_of(content, where, own=own))


def texts_of(content: Any, where: str, *, own: bool) -> list[str]:
    """The texts of a message's content, one for each part that has one.

    own: whether it is the client's own, which must then be a text or a list of parts; other content becomes JSON text.
    """
    if isinstance(content, str):
        return [content]
    is_list = isinstance(content, list) and all(isinstance(part, (Mapping, str)) for part in content)
    if is_list and (own or not content or any(isinstance(part, str) or _looks_like_a_part(part) for part in content)):
        texts = (part_text(part, f"{where}[{index}]", own=own) for index, part in enumerate(content))
        return [text for text in texts if text is not None]
    if own:
        raise ApiError(400, f"{where} must be a text or a list of parts.", where.partition("[")[0])
    if isinstance(content, Mapping) and _is_media(content):
        return texts_of([content], where, own=False)
    return [] if content is None else [_json_text(content)]


def part_text(part: Mapping[str, Any] | str, where: str, *, own: bool) -> str | None:
    """The text of one part of a message; None if it is left out.

    where: its path, for errors. own: whether it is the client's own, so that an image, a file or a recording is a 400; elsewhere a
    remark takes its place.
    """
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT_KINDS:
        text = part.get(_TEXT_KINDS[kind])
        return require_text(text, f"{where}.{_TEXT_KINDS[kind]}") if own or isinstance(text, str) else ""
    name = kind if isinstance(kind, str) else "part without a type"
    found = _described(part, kind)
    if found is not None:
        warn_once(f"Requests contain parts of the type {name!r:.{MAX_ECHO}}, of which the model reads the text.")
        return found
    if _is_media(part):
        if own:
            sentence = f"{where} has the type {kind!r:.{MAX_ECHO}}, which is not supported: this model only reads text."
            raise ApiError(400, sentence, where.partition("[")[0])
        warn_once(f"Requests contain parts of the type {name!r:.{MAX_ECHO}}, which this model cannot read: a remark takes their place.")
        return f"[{name.removeprefix('input_').removesuffix('_url'):.{MAX_ECHO}} omitted: this model reads text]"
    if not own:
        return _json_text(part)
    warn_once(f"Requests contain parts of the type {name!r:.{MAX_ECHO}}, which are left out.")
    return None


def _looks_like_a_part(value: Mapping[str, Any]) -> bool:
    """Whether an object is a part of a message. What a tool returned may also be a list of other objects, which is data."""
    return isinstance(value.get("type"), str) or isinstance(value.get("text"), str) or _is_media(value)


def _is_media(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return (isinstance(kind, str) and _MEDIA_KIND.search(kind) is not None) or not _MEDIA_FIELDS.isdisjoint(part)


def _described(part: Mapping[str, Any], kind: Any) -> str | None:
    """The text that a part of another type holds; None if it holds none."""
    source = part.get("source")
    if kind == "tool_reference" and isinstance(part.get("tool_name"), str):
        return f"[tool: {part['tool_name']}]"
    if kind in ("search_result", "web_search_result"):
        head = [text for text in (part.get("title"), source, part.get("url")) if isinstance(text, str)]
        return "\n".join([*head, *_inner_texts(part.get("content"))])
    if kind == "document" and isinstance(source, Mapping):
        text = _document_text(source)
        title = part.get("title")
        return f"{title}\n{text}" if text is not None and isinstance(title, str) else text
    if isinstance(part.get("text"), str):
        return str(part["text"])
    for holder in ("resource", "file"):  # of MCP and of OpenAI's chats
        if isinstance(held := part.get(holder), Mapping):
            return held["text"] if isinstance(held.get("text"), str) else _decoded(held.get("file_data"))
    if part.get("file_data") is not None:
        return _decoded(part["file_data"])
    if isinstance(part.get("content"), (str, list)):
        return "\n".join(_inner_texts(part["content"])) or None
    return None


def _inner_texts(content: Any) -> list[str]:
    """The texts in the content of a part. Parts within its parts are not searched, so that the depth is bounded."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "[omitted: nested too deeply]"


def _document_text(source: Mapping[str, Any]) -> str | None:
    data = source.get("data")
    if source.get("type") == "content":
        return "\n".join(_inner_texts(source.get("content")))
    if source.get("type") == "text":
        return data if isinstance(data, str) else None
    if source.get("type") == "base64" and str(source.get("media_type")).startswith("text/"):
        return _decoded(f"data:text/plain;base64,{data}")
    return None


def _decoded(url: Any) -> str | None:
    """The text of a data URL; None if it is none, or not of text."""
    if not isinstance(url, str) or (head := _DATA_URL.match(url)) is None:
        return None
    try:
        return base64.b64decode(url[head.end() :]).decode()
    except (binascii.Error, ValueError):
        return None


def readable_messages(messages: Sequence[Any]) -> list[Any]:
    """A chat's messages with content that the model can read, and calls of functions only. Raises a 400.

    Wrong messages stay as they are: the chat template's checks name what is wrong with them.
    """
    readable = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and isinstance(message.get("role"), str):
            message = _readable(message, f"messages[{index}]", is_first=index == 0)
        readable.append(message)
    return readable


def _readable(message: Mapping[str, Any], where: str, *, is_first: bool) -> dict[str, Any]:
    result = dict(message)
    role, content = message["role"], message.get("content")
    where = f"{where}.content"
    if role in ("tool", "function"):
        result["content"] = content_text(content, where, own=False)
    elif role in ("system", "developer"):
        text = content_text(content, where, own=True) if isinstance(content, list) else content
        result["content"] = without_billing_line(text) if is_first and isinstance(text, str) else text
    elif isinstance(content, list):
        result["content"] = [{"type": "text", "text": text} for text in texts_of(content, where, own=role != "assistant")]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_function_call(call) for call in calls]
    return result


def _function_call(call: Any) -> Any:
    """A call of a custom tool, or one that is written flat, as a call of a function."""
    if not isinstance(call, Mapping) or isinstance(call.get("function"), Mapping):
        return call
    given = call["custom"] if isinstance(call.get("custom"), Mapping) else call
    if not isinstance(given.get("name"), str):
        return call
    arguments = given.get("arguments") if "arguments" in given else custom_arguments(given.get("input"))
    return {"id": call.get("id"), "type": "function", "function": {"name": given["name"], "arguments": arguments}}


def custom_arguments(text: Any) -> str:
    """The arguments of a function that stands for a custom tool, which takes one text."""
    return json.dumps({CUSTOM_ARGUMENT: text if isinstance(text, str) else ""}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text in the arguments of such a function; of arguments that were cut off, the arguments themselves."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    text = value.get(CUSTOM_ARGUMENT, "") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else _json_text(text)

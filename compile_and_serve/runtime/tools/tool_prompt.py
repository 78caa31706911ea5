"""Tools for chat templates that do not render them: a system message describes them, and earlier calls become text.

Calls are written in the format of the tool parser, results as Hermes writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.tools.tool_use import ToolUse


def show_tools(messages: Sequence[Any], use: ToolUse, parsers: Parsers) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]]]:
    """The messages and the tools for the chat template."""
    if use.shown and not parsers.template_uses_tools and use.parser is not None:
        return _describe_tools(messages, use.shown, use.parser), ()
    return messages, use.shown


def _describe_tools(messages: Sequence[Any], tools: Sequence[Mapping[str, Any]], parser: type[ToolParser]) -> list[Any]:
    """The messages with the tools in the system message, and without tool calls and results."""
    converted = [_convert(message, parser) for message in messages]
    first = converted[0] if converted else None
    described = _description(tools, parser)
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": first["content"] + "\n\n" + described}, *converted[1:]]
    return [{"role": "system", "content": described}, *converted]


def _description(tools: Sequence[Mapping[str, Any]], parser: type[ToolParser]) -> str:
    lines = [json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools]
    return (
        "You may call these functions, given as JSON:\n"
        + "\n".join(lines)
        + "\n\nTo call a function, answer with nothing but this, with the function's name and its arguments as a JSON object:\n"
        + _written(parser, [("NAME", "{…}")])
    )


def _convert(message: Any, parser: type[ToolParser]) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if message.get("role") == "tool" and isinstance(content, str):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return message
    written = _written(parser, [_call(call) for call in calls])
    text = f"{content}\n{written}" if isinstance(content, str) and content else written
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _call(call: Any) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", "{}"
    arguments = function.get("arguments")
    return str(function.get("name", "")), arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def _written(parser: type[ToolParser], calls: Sequence[tuple[str, str]]) -> str:
    texts = []
    for name, arguments in calls:
        around = parser.call_format(name)
        assert around is not None  # `tool_use` refuses other parsers
        texts.append(around[0] + arguments + around[1])
    return parser.list_opener + parser.separator.join(texts) + (parser.list_closer if parser.list_opener else "")

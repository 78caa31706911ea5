"""For each tool parser: how a model writes calls in its format, and outputs that are malformed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.parsers.tools.deepseek_v3 import DeepseekV3Parser
from compile_and_serve.runtime.parsers.tools.granite import GraniteParser
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from compile_and_serve.runtime.parsers.tools.json_list import JsonListParser
from compile_and_serve.runtime.parsers.tools.llama3_json import Llama3JsonParser
from compile_and_serve.runtime.parsers.tools.mistral import MistralParser
from compile_and_serve.runtime.parsers.tools.phi4 import Phi4Parser
from compile_and_serve.runtime.parsers.tools.pythonic import PythonicParser
from compile_and_serve.runtime.parsers.tools.qwen3_coder import Qwen3CoderParser

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"type": "boolean"},
            "heights": {"type": "array", "items": {"type": "number"}},
            "options": {"type": "object"},
            "note": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Format:
    """parser: under test. write: calls as a model writes them. before: whether text may stand before the calls. malformed:
    outputs without a complete call, some of which begin one."""

    parser: type[ToolParser]
    write: Callable[[Calls], str]
    before: bool
    malformed: tuple[str, ...]


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _objects(calls))


def _coder_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _coder(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        parts = "".join(f"<parameter={key}>\n{_coder_value(value)}\n</parameter>\n" for key, value in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>")
    return "\n".join(texts)


def _deepseek(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    texts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _pythonic(calls: Calls) -> str:
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
    return "[" + ", ".join(written) + "]"


def _list(opener: str, closer: str = "") -> Callable[[Calls], str]:
    return lambda calls: f"{opener}[{', '.join(_objects(calls))}]{closer}"


_BAD_OBJECTS = (
    '{"name": "get_weather", "arguments": {"city": "Paris"',
    '{"name": "get_weather", "arguments": {city: "Paris"}}',
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": 5, "arguments": {}}',
    '{"name": "get_weather", "name": "now"}',
    '{"arguments": {"city": "Paris"}}',
    '{"name": "get_weather", "arguments": "no JSON"}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"name": "now", "arguments": {"x": 01}}',
    "no object",
    "",
)


def _bad(before: str, after: str = "") -> tuple[str, ...]:
    return tuple(before + text + after for text in _BAD_OBJECTS)


FORMATS: dict[str, Format] = {
    "hermes": Format(HermesParser, _hermes, True, _bad("Well <tool_call>\n", "\n</tool_call> so")),
    "llama3_json": Format(
        Llama3JsonParser, lambda calls: "; ".join(_objects(calls, "parameters")), False, (*_bad(""), '{"name": "Bob", "age": 3}')
    ),
    "llama3_json, python_tag": Format(
        Llama3JsonParser, lambda calls: "<|python_tag|>" + "; ".join(_objects(calls, "parameters")), True, ()
    ),
    "mistral": Format(MistralParser, _list("[TOOL_CALLS]"), True, _bad("[TOOL_CALLS][", "]")),
    "mistral, named": Format(
        MistralParser,
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls),
        True,
        ("[TOOL_CALLS]get_weather[ARGS]", "[TOOL_CALLS]get_weather{'a': 1}", "[TOOL_CALLS]" + "x" * 500, "[TOOL_CALLS]a [b] {}"),
    ),
    "qwen3_coder": Format(
        Qwen3CoderParser,
        _coder,
        True,
        (
            "<tool_call>\n<function=now>\n",
            "<tool_call>\nnow()\n</tool_call>",
            "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n",
            "<function=now>\nfree text</function>",
            "<function=" + "x" * 400 + ">",
        ),
    ),
    "deepseek_v3": Format(
        DeepseekV3Parser,
        _deepseek,
        True,
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{1}\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>text<｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + "x" * 800,
        ),
    ),
    "deepseek_v3, 3.1": Format(DeepseekV3Parser, _deepseek_v31, True, ()),
    "pythonic": Format(
        PythonicParser,
        _pythonic,
        False,
        ("[now(1)]", "[now(a=b)]", "[now(", "[link](http://x)", "[1, 2]", "[now(a=1e999)]", "[unknown(a=1)]", "[now(a=" + "[" * 400),
    ),
    "granite": Format(GraniteParser, _list("<|tool_call|>"), True, _bad("<|tool_call|>[", "]")),
    "granite, 3.1": Format(GraniteParser, _list("<tool_call>"), True, ()),
    "phi4": Format(Phi4Parser, _list("functools"), True, _bad("functools[", "]")),
    "phi4, tokens": Format(Phi4Parser, _list("<|tool_call|>", "<|/tool_call|>"), True, _bad("<|tool_call|>", "<|/tool_call|>")),
    "json_list": Format(JsonListParser, _list(""), False, _bad("[", "]")),
}

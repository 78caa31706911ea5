"""For each tool parser: how a model writes calls in its format, and outputs that are malformed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.parsers.tools.deepseek_v3 import DeepseekV3Parser
from compile_and_serve.runtime.parsers.tools.glm45 import Glm45Parser
from compile_and_serve.runtime.parsers.tools.granite import GraniteParser
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from compile_and_serve.runtime.parsers.tools.hunyuan_a13b import HunyuanA13bParser
from compile_and_serve.runtime.parsers.tools.internlm import InternlmParser
from compile_and_serve.runtime.parsers.tools.json_list import JsonListParser
from compile_and_serve.runtime.parsers.tools.kimi_k2 import KimiK2Parser
from compile_and_serve.runtime.parsers.tools.lfm2 import Lfm2Parser
from compile_and_serve.runtime.parsers.tools.llama3_json import Llama3JsonParser
from compile_and_serve.runtime.parsers.tools.minimax_m2 import MinimaxM2Parser
from compile_and_serve.runtime.parsers.tools.mistral import MistralParser
from compile_and_serve.runtime.parsers.tools.olmo3 import Olmo3Parser
from compile_and_serve.runtime.parsers.tools.phi4 import Phi4Parser
from compile_and_serve.runtime.parsers.tools.pythonic import PythonicParser
from compile_and_serve.runtime.parsers.tools.qwen3_coder import Qwen3CoderParser
from compile_and_serve.runtime.parsers.tools.seed_oss import SeedOssParser
from compile_and_serve.runtime.parsers.tools.step3 import Step3Parser
from compile_and_serve.runtime.parsers.tools.xlam import XlamParser

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


def _coder(calls: Calls, block: str = "tool_call", line: str = "\n") -> str:
    texts = []
    for name, arguments in calls:
        parts = "".join(f"<parameter={key}>{line}{_coder_value(value)}{line}</parameter>\n" for key, value in arguments.items())
        texts.append(f"<{block}>\n<function={name}>\n{parts}</function>\n</{block}>")
    return "\n".join(texts)


def _glm(calls: Calls, line: str = "\n") -> str:
    texts = []
    for name, arguments in calls:
        parts = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_coder_value(value)}</arg_value>{line}" for key, value in arguments.items()
        )
        texts.append(f"<tool_call>{name}{line}{parts}</tool_call>")
    return line.join(texts)


def _invocations(calls: Calls, prefix: str) -> list[str]:
    return [
        f'<{prefix}invoke name="{name}">'
        + "".join(f'<{prefix}parameter name="{key}">{_coder_value(value)}</{prefix}parameter>' for key, value in arguments.items())
        + f"</{prefix}invoke>"
        for name, arguments in calls
    ]


def _minimax(calls: Calls) -> str:
    return "<minimax:tool_call>\n" + "\n".join(_invocations(calls, "")) + "\n</minimax:tool_call>"


def _step3(calls: Calls) -> str:
    texts = [f"<｜tool_call_begin｜>function<｜tool_sep｜>{text}<｜tool_call_end｜>" for text in _invocations(calls, "steptml:")]
    return "<｜tool_calls_begin｜>\n" + "\n".join(texts) + "\n<｜tool_calls_end｜>"


def _kimi(calls: Calls) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def _internlm(calls: Calls) -> str:
    return "\n".join(f"<|action_start|><|plugin|>\n{text}<|action_end|>" for text in _objects(calls, "parameters"))


def _deepseek(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    texts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def _python_calls(calls: Calls) -> list[str]:
    return [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]


def _pythonic(calls: Calls) -> str:
    return "[" + ", ".join(_python_calls(calls)) + "]"


def _olmo3(calls: Calls) -> str:
    """Values in JSON, as the model's template has them."""
    written = [f"{name}({', '.join(f'{k}={json.dumps(v)}' for k, v in arguments.items())})" for name, arguments in calls]
    return "<function_calls>" + "\n".join(written) + "</function_calls>"


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
    "pythonic, Llama 4": Format(
        PythonicParser,
        lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>",
        True,
        ("<|python_start|>now()", "<|python_start|>["),
    ),
    "lfm2": Format(
        Lfm2Parser,
        lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
        True,
        ("<|tool_call_start|>", "<|tool_call_start|>[now(1)]", "<|tool_call_start|>[now(a='b'", "<|tool_call_start|>x<|tool_call_end|>"),
    ),
    "olmo3": Format(
        Olmo3Parser,
        _olmo3,
        True,
        ("<function_calls>", "<function_calls></function_calls>", "<function_calls>now(", '<function_calls>now(a="b)</function_calls>'),
    ),
    "glm45": Format(
        Glm45Parser,
        _glm,
        True,
        (
            "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1",
            "<tool_call>",
            "<tool_call>now\n",
            "<tool_call>now\n<arg_key>a</arg_key>\n1</tool_call>",
            '<tool_call>{"name": "now"}</tool_call>',
            "<tool_call>" + "x" * 400 + "</tool_call>",
        ),
    ),
    "glm45, 4.7": Format(Glm45Parser, lambda calls: _glm(calls, ""), True, ()),
    "minimax_m2": Format(
        MinimaxM2Parser,
        _minimax,
        True,
        (
            "<minimax:tool_call>",
            '<minimax:tool_call><invoke name="now">',
            "<minimax:tool_call>now</minimax:tool_call>",
            '<minimax:tool_call><invoke name="now">text</invoke></minimax:tool_call>',
        ),
    ),
    "seed_oss": Format(
        SeedOssParser,
        lambda calls: _coder(calls, "seed:tool_call", ""),
        True,
        ("<seed:tool_call>", "<seed:tool_call>now", "<seed:tool_call><function=now><parameter=a>1</parameter>"),
    ),
    "step3": Format(
        Step3Parser,
        _step3,
        True,
        (
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"><steptml:parameter name="a">1',
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>now",
            '<｜tool_calls_begin｜><steptml:invoke name="now">text',
        ),
    ),
    "kimi_k2": Format(
        KimiK2Parser,
        _kimi,
        True,
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_begin|>now<|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{1}<|tool_call_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>" + "x" * 800,
        ),
    ),
    "hunyuan_a13b": Format(HunyuanA13bParser, _list("<tool_calls>", "</tool_calls>"), True, _bad("<tool_calls>[", "]</tool_calls>")),
    "internlm": Format(InternlmParser, _internlm, True, _bad("<|action_start|><|plugin|>\n", "<|action_end|>")),
    "xlam": Format(XlamParser, _list(""), False, _bad("[", "]")),
    "xlam, code": Format(XlamParser, _list("```json\n", "\n```"), True, ('```json\n[{"a": 1}]\n```', '```json\n[{"name": "x"}]\n```')),
    "xlam, marker": Format(XlamParser, _list("[TOOL_CALLS]"), True, _bad("[TOOL_CALLS][", "]")),
}

"""Hermes' format, which Qwen's models use too."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.json_scanner import to_json
from compile_and_serve.runtime.parsers.tools.base import mentions
from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class HermesParser(JsonCallsParser):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of times."""

    name = "hermes"
    trigger = "<tool_call>"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)
    markers = openers + closers

    @classmethod
    def matches(cls, template: str) -> bool:
        is_other = "<function=" in template or "<arg_key>" in template
        return mentions(template, "<tool_call>", "</tool_call>", "arguments") and not is_other

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {to_json(name)}, "arguments": ', "}\n</tool_call>"

"""The format of Granite 3."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class GraniteParser(JsonCallsParser):
    """<|tool_call|>[{"name": …, "arguments": {…}}, …] (Granite 3.0), or <tool_call>[…] (Granite 3.1 and later)."""

    name = "granite"
    list_opener = "<|tool_call|>["
    separator = ", "
    trigger = "<|tool_call|>"
    openers = ("<|tool_call|>", "<tool_call>")
    markers = openers
    closers = ("</tool_call>",)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|start_of_role|>" in template and "<|tool_call|>" in template

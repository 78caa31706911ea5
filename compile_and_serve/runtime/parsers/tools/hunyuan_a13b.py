"""The format of Hunyuan-A13B."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class HunyuanA13bParser(JsonCallsParser):
    """<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>."""

    name = "hunyuan_a13b"
    list_opener, list_closer = "<tool_calls>[", "]</tool_calls>"
    separator = ", "
    trigger = "<tool_calls>"
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    markers = openers + closers

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<tool_calls>" in template

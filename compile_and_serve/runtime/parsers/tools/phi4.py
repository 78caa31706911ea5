"""The formats of Phi-4-mini."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class Phi4Parser(JsonCallsParser):
    """functools[{"name": …, "arguments": {…}}, …], or <|tool_call|>…<|/tool_call|> around an object or a list."""

    name = "phi4"
    list_opener = "functools["
    separator = ", "
    trigger = "functools["
    openers = ("functools[", "<|tool_call|>")
    closers = ("<|/tool_call|>",)
    markers = ("<|tool_call|>", "<|/tool_call|>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|tool|>" in template and "<|/tool|>" in template

    def _opened(self, marker: str) -> None:
        super()._opened(marker)
        self._in_list = marker.endswith("[")

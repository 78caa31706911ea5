"""The format of InternLM 2 and 2.5."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.json_scanner import to_json
from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class InternlmParser(JsonCallsParser):
    """<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>."""

    name = "internlm"
    trigger = "<|action_start|><|plugin|>"
    openers = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    closers = ("<|action_end|>",)
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|action_start|>" in template

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f'<|action_start|><|plugin|>\n{{"name": {to_json(name)}, "parameters": ', "}\n<|action_end|>"

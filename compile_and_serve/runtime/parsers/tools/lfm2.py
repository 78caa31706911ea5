"""The format of LFM2."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.pythonic_calls import PythonicCallsParser


class Lfm2Parser(PythonicCallsParser):
    """<|tool_call_start|>[name(key=value, …), …]<|tool_call_end|>."""

    name = "lfm2"
    openers = ("<|tool_call_start|>",)
    closers = ("<|tool_call_end|>",)
    markers = openers + closers

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|tool_list_start|>" in template or "<|tool_call_start|>" in template

"""Calls written as a list of Python calls (Llama 3.2 and 4, ToolACE)."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.pythonic_calls import PythonicCallsParser


class PythonicParser(PythonicCallsParser):
    """The whole output is [name(key=value, …), …]. Llama 4 writes <|python_start|> and <|python_end|> around it."""

    name = "pythonic"
    openers = ("<|python_start|>", "<|python_tag|>")
    closers = ("<|python_end|>",)
    markers = openers + closers
    bare = True

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[func_name1(params_name1=params_value1" in template

"""The format of Olmo 3."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.pythonic_calls import PythonicCallsParser


class Olmo3Parser(PythonicCallsParser):
    """<function_calls>name(key=value, …)</function_calls>, with further calls on lines of their own."""

    name = "olmo3"
    openers = ("<function_calls>",)
    closers = ("</function_calls>",)
    markers = openers + closers
    in_list = False

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<function_calls>" in template

"""The format of Kimi-K2."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.tools.section_calls import SectionCallsParser

_SEPARATOR = "<|tool_call_argument_begin|>"


class KimiK2Parser(SectionCallsParser):
    """Calls between special tokens, each with an id functions.NAME:INDEX, a separator and the arguments."""

    name = "kimi_k2"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    head = re.compile(rf"\s*(?:functions\.)?([^\s<{{]{{1,256}}?)(?::\d+)?\s*{re.escape(_SEPARATOR)}\s*(?=\{{)")
    list_opener, list_closer = section
    separator = ""
    trigger = section[0]
    openers = (section[0], call[0])
    markers = (*section, *call, _SEPARATOR)

    @classmethod
    def call_id(cls, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f"{cls.call[0]}functions.{name}:0{_SEPARATOR}", cls.call[1]

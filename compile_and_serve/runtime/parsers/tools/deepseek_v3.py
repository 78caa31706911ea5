"""The formats of DeepSeek-V3, R1 and V3.1."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.tools.section_calls import SectionCallsParser

_SEPARATOR = "<｜tool▁sep｜>"


class DeepseekV3Parser(SectionCallsParser):
    """Calls between special tokens. V3: "function", a separator, the name and a code block. V3.1: name, separator, arguments."""

    name = "deepseek_v3"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    fence = "```"
    head = re.compile(rf"\s*([^\s<{{]{{1,256}})\s*{re.escape(_SEPARATOR)}(?:\s*([^\s<{{`]{{1,256}})\s*```json)?\s*(?=\{{)")
    list_opener, list_closer = section
    trigger = section[0]
    openers = (section[0], call[0])
    markers = (*section, *call, _SEPARATOR)

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f"{cls.call[0]}function{_SEPARATOR}{name}\n```json\n", f"\n```{cls.call[1]}"

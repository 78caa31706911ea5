"""The format of MiniMax-M2."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.tools.xml_calls import XmlCallsParser

_TAG = re.compile(r'"?([^\s<>"]{1,256})"?\s*>')


class MinimaxM2Parser(XmlCallsParser):
    """<minimax:tool_call> and any number of <invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>."""

    name = "minimax_m2"
    block = ("<minimax:tool_call>", "</minimax:tool_call>")
    name_opener, name_tag, call_closer = "<invoke name=", _TAG, "</invoke>"
    key_opener, key_tag, value_closer = "<parameter name=", _TAG, "</parameter>"
    openers = (block[0],)
    markers = block

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.block[0] in template

"""The format of Step-3."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.tools.xml_calls import XmlCallsParser

_TAG = re.compile(r'"?([^\s<>"]{1,256})"?\s*>')
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"


class Step3Parser(XmlCallsParser):
    """Special tokens around <steptml:invoke name="NAME"><steptml:parameter name="KEY">VALUE</steptml:parameter>…</steptml:invoke>."""

    name = "step3"
    block = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
    fillers = (_CALL_BEGIN, "function", _SEPARATOR, _CALL_END)
    name_opener, name_tag, call_closer = "<steptml:invoke name=", _TAG, "</steptml:invoke>"
    key_opener, key_tag, value_closer = "<steptml:parameter name=", _TAG, "</steptml:parameter>"
    openers = (block[0], _CALL_BEGIN)
    markers = (*block, _CALL_BEGIN, _SEPARATOR, _CALL_END)

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.block[0] in template

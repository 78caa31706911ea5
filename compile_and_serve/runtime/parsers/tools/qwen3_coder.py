"""The XML format of Qwen3-Coder, which MiMo and Step 3.5 use too."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.tools.base import mentions
from compile_and_serve.runtime.parsers.tools.xml_calls import XmlCallsParser

_TAG = re.compile(r'"?([^\s<>"]{1,256})"?>')


class Qwen3CoderParser(XmlCallsParser):
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>."""

    name = "qwen3_coder"
    block = ("<tool_call>", "</tool_call>")
    name_opener, name_tag, call_closer = "<function=", _TAG, "</function>"
    key_opener, key_tag, value_closer = "<parameter=", _TAG, "</parameter>"
    openers = (block[0], name_opener)
    markers = block

    @classmethod
    def matches(cls, template: str) -> bool:
        return mentions(template, "<function=", "<parameter=", cls.block[0])

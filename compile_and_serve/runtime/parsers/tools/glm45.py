"""The format of GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.tools.xml_calls import XmlCallsParser


class Glm45Parser(XmlCallsParser):
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>. Until 4.6 each has a line of its own."""

    name = "glm45"
    name_opener, call_closer = "<tool_call>", "</tool_call>"
    name_tag = re.compile(r"\s*([^\s<>{}\"]{1,200})\s*(?=<)")
    key_opener, value_closer = "<arg_key>", "</arg_value>"
    key_tag = re.compile(r"\s*([^\s<>]{1,200})\s*</arg_key>\s*<arg_value>")
    key_brackets = 2
    value_has_line = False
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<arg_key>" in template

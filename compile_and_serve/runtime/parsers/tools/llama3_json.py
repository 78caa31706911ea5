"""The JSON format of Llama 3.1 and later."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.base import mentions
from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class Llama3JsonParser(JsonCallsParser):
    """The whole output is {"name": …, "parameters": {…}}, or several of them with "; " between. <|python_tag|> may come first."""

    name = "llama3_json"
    separator = "; "
    arguments_key = "parameters"
    openers = ("<|python_tag|>",)
    markers = openers
    separators = ";,"
    bare = "{"

    @classmethod
    def matches(cls, template: str) -> bool:
        return mentions(template, "<|start_header_id|>", '"parameters": dictionary of argument name')

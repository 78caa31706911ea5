"""A plain JSON list of calls: the format of outputs that a grammar forces and no model's own format describes."""

from __future__ import annotations

from compile_and_serve.serve.parsers.json_scanner import to_json
from compile_and_serve.serve.parsers.tools.json_calls import JsonCallsParser


class JsonListParser(JsonCallsParser):
    """The whole output is [{"name": …, "parameters": {…}}, …]."""

    name = "json_list"
    list_opener = "["
    separator = ", "
    bare = "["

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {to_json(name)}, "parameters": ', "}"

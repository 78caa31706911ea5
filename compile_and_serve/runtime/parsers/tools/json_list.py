"""A plain JSON list of calls: the format of outputs that a grammar forces and no model's own format describes."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class JsonListParser(JsonCallsParser):
    """The whole output is [{"name": …, "parameters": {…}}, …]."""

    name = "json_list"
    list_opener = "["
    separator = ", "
    arguments_key = "parameters"
    bare = "["

"""A plain JSON list of calls: the format of outputs that a grammar forces and no model's own format describes."""

from __future__ import annotations

from typing import Any

from compile_and_serve.serve.parsers.json_scanner import to_json
from compile_and_serve.serve.parsers.tools.json_calls import JsonCallsParser


class JsonListParser(JsonCallsParser):
    """The whole output is [{"name": …, "parameters": {…}}, …]."""

    name = "json_list"
    bare = "["

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {to_json(name)}, "parameters": ', "}"

    @classmethod
    def calls_format(cls, tags: list[dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
        return in_list(super().calls_format(tags, parallel=parallel), "[")


def in_list(calls: dict[str, Any], opener: str) -> dict[str, Any]:
    """The structural tag of calls in a JSON list after `opener`, which ends with the list's bracket."""
    elements = [
        {"type": "const_string", "value": opener},
        {**calls, "separator": ", "},
        {"type": "const_string", "value": "]"},
    ]
    return {"type": "sequence", "elements": elements}

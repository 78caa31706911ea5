"""`negated`: a schema without `not` that only accepts what another schema refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})
TYPES = ("null", "boolean", "number", "string", "array", "object")  # an integer is a number
_MAX_CHARS = 4000  # of the strings that a pattern excludes
_MAX_LENGTH = 60  # of one of them: each character nests the pattern four levels deeper, of which the library takes 250
_MAX_DEPTH = 16


def negated(schema: Any, depth: int = 0) -> Any:
    """Equivalent to `not` of the schema, or narrower. None if there is no such schema.

    A value fails a schema if it fails one of its keywords. So keywords that cannot be negated are left out, if another one can.
    """
    if isinstance(schema, bool):
        return not schema
    # Up to draft 7, the keywords beside a reference are ignored.
    if not isinstance(schema, dict) or "$ref" in schema or depth > _MAX_DEPTH:
        return None
    if not schema.keys() - ANNOTATIONS:
        return False
    found = [one for name, value in schema.items() for one in _keyword(name, value, depth + 1)]
    return None if not found else found[0] if len(found) == 1 else {"anyOf": found}


def _keyword(name: str, value: Any, depth: int) -> list[Any]:
    """Schemas of which each refuses what satisfies one keyword; none if it cannot be negated."""
    if name in ("const", "enum"):
        texts = [value] if name == "const" else value
        return _none_of(texts) if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else []
    if name == "required" and isinstance(value, list):
        return [{"type": "object", "properties": {key: False}} for key in value if isinstance(key, str)]
    if name == "properties" and isinstance(value, dict):
        parts = [(key, negated(child, depth)) for key, child in value.items()]
        return [
            {"type": "object", "properties": {key: part}, "required": [key]}
            for key, part in parts
            if part is not None and part is not False
        ]
    return []


def _none_of(texts: list[str]) -> list[Any]:
    if sum(map(len, texts)) > _MAX_CHARS or any(len(text) > _MAX_LENGTH for text in texts):
        return []
    return [{"type": [kind for kind in TYPES if kind != "string"]}, {"type": "string", "pattern": f"^{_other_texts(texts)}$"}]


def type_of(value: Any) -> str:
    """The JSON schema type of a value; "number" also for integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _other_texts(texts: Sequence[str]) -> str:
    """A regex for all texts but these."""
    ends = "" in texts
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    listed = "".join(map(re.escape, following))
    other = rf"[^{listed}](?s:.*)" if following else "(?s:.+)"
    branches = [other, *(re.escape(char) + _other_texts(rest) for char, rest in following.items())]
    return f"(?:{'|'.join(branches)}){'' if ends else '?'}"

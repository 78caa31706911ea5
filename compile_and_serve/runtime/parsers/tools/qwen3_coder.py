"""The XML format of Qwen3-Coder."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from compile_and_serve.runtime.parsers.json_scanner import to_json
from compile_and_serve.runtime.parsers.text import find_marker, may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser, mentions

_FUNCTION = "<function="
_NAME = re.compile(r"([^\s<>]{1,256})>")
_PARAMETER_START = "<parameter="
_PARAMETER = re.compile(r"<parameter=([^\s<>]{1,256})>\n?")
_MAX_TAG = 300
# The last two are for models that forget the first.
_VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Qwen3CoderParser(ToolParser):
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>.

    A value has the type that the tool's schema declares, and is a string where it declares none. String values are streamed.
    """

    name = "qwen3_coder"
    openers = ("<tool_call>", _FUNCTION)
    markers = ("<tool_call>", "</tool_call>")

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._properties: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        self._key = ""
        self._streams = False

    @classmethod
    def matches(cls, template: str) -> bool:
        return mentions(template, "<function=", "<parameter=")

    def _opened(self, marker: str) -> None:
        self._state = self._function if marker == "<tool_call>" else self._name

    def _function(self) -> bool:
        if not self._skip_whitespace():
            return False
        if not self._buffer.startswith(_FUNCTION):
            return False if may_become(self._buffer, (_FUNCTION,)) else self._drop()
        self._take(len(_FUNCTION))
        self._state = self._name
        return True

    def _name(self) -> bool:
        tag = _NAME.match(self._buffer)
        if tag is None:
            is_open = len(self._buffer) <= _MAX_TAG and re.fullmatch(r"[^\s<>]*", self._buffer) is not None
            return False if is_open else self._drop()
        self._take(tag.end())
        schema = self.schemas.get(tag[1], {})
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._keys = set()
        self._begin(tag[1])
        self._arguments("{")
        self._state = self._parameter
        return True

    def _parameter(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._buffer.startswith("</function>"):
            self._take(len("</function>"))
            self._arguments("}")
            self._end()
            self._state = self._closer
            return True
        if may_become(self._buffer, ("</function>",)):
            return False
        tag = _PARAMETER.match(self._buffer)
        if tag is None or (tag.end() == len(self._buffer) and not tag[0].endswith("\n")):
            is_open = tag is not None or self._may_be_parameter()
            return False if is_open else self._drop()
        if tag[1] in self._keys:
            return self._drop()
        self._take(tag.end())
        self._arguments((", " if self._keys else "") + to_json(tag[1]) + ": ")
        self._key = tag[1]
        self._keys.add(tag[1])
        self._streams = self._types() == {"string"}
        if self._streams:
            self._arguments('"')
        self._state = self._value
        return True

    def _value(self) -> bool:
        at, marker = find_marker(self._buffer, _VALUE_ENDS)
        if marker is None and not self._streams:
            return False
        text = self._take(at)
        if self._streams:
            self._arguments(to_json(text)[1:-1])
        if marker is None:
            return False
        if not self._streams:
            self._arguments(to_json(_typed(text, self._types())))
        else:
            self._arguments('"')
        if marker.endswith("</parameter>"):
            self._take(len(marker))
        self._state = self._parameter
        return True

    def _closer(self) -> bool:
        if not self._skip_whitespace():
            return False
        if may_become(self._buffer, ("</tool_call>",)):
            return False
        if self._buffer.startswith("</tool_call>"):
            self._take(len("</tool_call>"))
        self._whitespace, self._raw = self._raw[len(self._raw.rstrip()) :], ""
        self._state = self._text
        return True

    def _end_of_text(self) -> None:
        if self._state == self._closer:
            self._buffer = self._raw = ""
            self._state = self._text

    def _may_be_parameter(self) -> bool:
        if may_become(self._buffer, (_PARAMETER_START,)):
            return True
        rest = self._buffer.removeprefix(_PARAMETER_START)
        is_prefixed = len(rest) < len(self._buffer)
        return is_prefixed and len(rest) <= _MAX_TAG and re.fullmatch(r"[^\s<>]*", rest) is not None

    def _types(self) -> set[str]:
        schema = self._properties.get(self._key)
        return _declared_types(schema) or {"string"}


def _declared_types(schema: Any) -> set[str]:
    """Names of the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            found |= _declared_types(option)
    return found


def _typed(text: str, types: set[str]) -> Any:
    """The value that a text stands for, as JSON or as a Python literal; the text itself if it has none of the types."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            is_wanted = any(type(value) in _TYPES.get(kind, ()) for kind in types)
            if is_wanted and json.loads(json.dumps(value, allow_nan=False)) == value:
                return value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text

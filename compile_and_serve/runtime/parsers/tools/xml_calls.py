"""Base of the formats whose calls are written in tags like those of XML."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from compile_and_serve.runtime.parsers.json_scanner import to_json
from compile_and_serve.runtime.parsers.text import find_marker, may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser

_MAX_TAG = 300
_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class XmlCallsParser(ToolParser):
    """Calls whose name and arguments stand in tags, alone or in a block of calls.

    A value has the type that the tool's schema declares, and is a string where it declares none. String values are streamed.

    block: texts around a block of calls; empty if there are none. fillers: texts without meaning between the calls.
    name_opener, name_tag: text before the name of a call, and what follows it, whose first group is the name.
    key_opener, key_tag: the same for the key of an argument. key_brackets: number of > in a key_tag.
    value_closer, call_closer: texts after a value and after a call.
    value_has_line: whether a line break may stand before and after a value, which is not a part of it.
    """

    block: ClassVar[tuple[str, str]] = ("", "")
    fillers: ClassVar[tuple[str, ...]] = ()
    name_opener: ClassVar[str]
    name_tag: ClassVar[re.Pattern[str]]
    key_opener: ClassVar[str]
    key_tag: ClassVar[re.Pattern[str]]
    key_brackets: ClassVar[int] = 1
    value_closer: ClassVar[str]
    call_closer: ClassVar[str]
    value_has_line: ClassVar[bool] = True

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._properties: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        self._key = ""
        self._streams = False
        # Models forget the first of these.
        self._value_ends = [self.value_closer, "\n" + self.key_opener, "\n" + self.call_closer]
        if self.value_has_line:
            self._value_ends.append("\n" + self.value_closer)

    def _opened(self, marker: str) -> None:
        self._state = self._name if marker == self.name_opener else self._call

    def _next(self, *expected: str) -> str | None:
        """Consume whitespace, fillers and one of the expected texts, which is returned.

        "" if the text is none of them; None if more text is needed.
        """
        while self._skip_whitespace():
            found = next((text for text in (*self.fillers, *expected) if text and self._buffer.startswith(text)), "")
            if not found:
                return None if may_become(self._buffer, (*self.fillers, *expected)) else ""
            self._take(len(found))
            if found in expected:
                return found
        return None

    def _call(self) -> bool:
        found = self._next(self.name_opener)
        if found is None:
            return False
        if not found:
            return self._drop()
        self._state = self._name
        return True

    def _tag(self, tag: re.Pattern[str], brackets: int = 1) -> str | None:
        """Consume a tag. Its first group; "" if the text is no tag; None if more text is needed."""
        match = tag.match(self._buffer[:_MAX_TAG])
        if match is None:
            is_open = len(self._buffer) < _MAX_TAG and self._buffer.count(">") < brackets
            return None if is_open else ""
        self._take(match.end())
        return match[1]

    def _name(self) -> bool:
        name = self._tag(self.name_tag)
        if name is None:
            return False
        if not name:
            return self._drop()
        schema = self.schemas.get(name, {})
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._keys = set()
        self._begin(name)
        self._arguments("{")
        self._state = self._parameter
        return True

    def _parameter(self) -> bool:
        found = self._next(self.key_opener, self.call_closer)
        if found is None:
            return False
        if found == self.call_closer:
            self._arguments("}")
            self._end()
            self._state = self._after_call_text if self.block[1] else self._text
        elif found:
            self._state = self._key_text
        else:
            self._drop()
        return True

    def _key_text(self) -> bool:
        key = self._tag(self.key_tag, self.key_brackets)
        if key is None:
            return False
        if not key or key in self._keys:
            return self._drop()
        self._arguments((", " if self._keys else "") + to_json(key) + ": ")
        self._key = key
        self._keys.add(key)
        self._streams = self._types() == {"string"}
        if self._streams:
            self._arguments('"')
        self._state = self._value_head if self.value_has_line else self._value
        return True

    def _value_head(self) -> bool:
        if not self._buffer:
            return False
        self._take(self._buffer[0] == "\n")
        self._state = self._value
        return True

    def _value(self) -> bool:
        at, marker = find_marker(self._buffer, self._value_ends)
        if marker is None and not self._streams:
            return False
        text = self._take(at)
        if self._streams:
            self._arguments(to_json(text)[1:-1])
        if marker is None:
            return False
        self._arguments('"' if self._streams else to_json(_typed(text, self._types())))
        if marker.endswith(self.value_closer):
            self._take(len(marker))
        self._state = self._parameter
        return True

    def _after_call_text(self) -> bool:
        found = self._next(self.name_opener, self.block[1])
        if found is None:
            return False
        if found and found == self.name_opener:
            self._state = self._name
            return True
        self._whitespace, self._raw = self._raw[len(self._raw.rstrip()) :], ""
        self._state = self._text
        return True

    def _end_of_text(self) -> None:
        if self._state == self._after_call_text:
            self._buffer = self._raw = ""
            self._state = self._text

    def _types(self) -> set[str]:
        return _declared_types(self._properties.get(self._key)) or {"string"}


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

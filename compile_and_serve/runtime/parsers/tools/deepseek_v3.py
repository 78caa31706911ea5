"""The formats of DeepSeek-V3, R1 and V3.1."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.json_scanner import ObjectReader
from compile_and_serve.runtime.parsers.text import may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# V3: "function", the separator, the name and a code block. V3.1: the name, the separator and the arguments.
_HEAD = re.compile(rf"\s*([^\s<{{]{{1,256}})\s*{re.escape(_SEPARATOR)}(?:\s*([^\s<{{`]{{1,256}})\s*```json)?\s*(?=\{{)")
_MAX_HEAD = 700
_CLOSERS = ("```" + _CALL_END, _CALL_END, "```", _CALL_BEGIN, _CALLS_END)


class DeepseekV3Parser(ToolParser):
    """Calls between special tokens, each with a name and a JSON object."""

    name = "deepseek_v3"
    list_opener, list_closer = _CALLS_BEGIN, _CALLS_END
    trigger = _CALLS_BEGIN
    openers = (_CALLS_BEGIN, _CALL_BEGIN)
    markers = (_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._object = ObjectReader()

    @classmethod
    def matches(cls, template: str) -> bool:
        return _CALLS_BEGIN in template

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}"

    def _opened(self, marker: str) -> None:
        self._state = self._head if marker == _CALL_BEGIN else self._first

    def _first(self) -> bool:
        if not self._skip_whitespace():
            return False
        if not self._buffer.startswith(_CALL_BEGIN):
            return False if may_become(self._buffer, (_CALL_BEGIN,)) else self._drop()
        self._take(len(_CALL_BEGIN))
        self._state = self._head
        return True

    def _head(self) -> bool:
        head = _HEAD.match(self._buffer[:_MAX_HEAD])
        if head is None:
            is_open = "{" not in self._buffer and len(self._buffer) < _MAX_HEAD
            is_open = is_open and not any(m in self._buffer for m in (_CALL_BEGIN, _CALL_END, _CALLS_END))
            return False if is_open else self._drop()
        self._take(head.end())
        self._begin(head[2] or head[1])
        self._object = ObjectReader()
        self._state = self._object_text
        return True

    def _object_text(self) -> bool:
        return self._read_object(self._object, self._after_call_text)

    def _after_call_text(self) -> bool:
        if not self._skip_whitespace():
            return False
        closer = next((closer for closer in _CLOSERS if self._buffer.startswith(closer)), None)
        if closer in (_CALL_BEGIN, _CALLS_END):
            self._raw = ""
            self._take(len(closer))
            self._state = self._head if closer == _CALL_BEGIN else self._closed
        elif closer is not None:
            self._take(len(closer))
        elif may_become(self._buffer, _CLOSERS):
            return False
        else:
            self._closed()
        return True

    def _closed(self) -> bool:
        self._raw = ""
        self._state = self._text
        return True

    def _end_of_text(self) -> None:
        if self._state == self._after_call_text:
            self._buffer = ""
            self._closed()

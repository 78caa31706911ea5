"""Base of the formats whose calls are a name and a JSON object between special tokens."""

from __future__ import annotations

import re
from typing import ClassVar

from compile_and_serve.runtime.parsers.json_scanner import ObjectReader
from compile_and_serve.runtime.parsers.text import may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser

_MAX_HEAD = 700


class SectionCallsParser(ToolParser):
    """A section of calls, each with a head that names the tool, and its arguments as a JSON object.

    section, call: texts around the section and around a call. fences: texts that may stand around the arguments.
    head: what stands between the beginning of a call and its arguments; the last group that takes part is the name.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    fence: ClassVar[str] = ""
    head: ClassVar[re.Pattern[str]]

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._object = ObjectReader()
        fenced = (self.fence + self.call[1], self.fence) if self.fence else ()
        self._after_arguments = (*fenced, self.call[1], self.call[0], self.section[1])

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.section[0] in template

    def _opened(self, marker: str) -> None:
        self._state = self._head if marker == self.call[0] else self._first

    def _first(self) -> bool:
        if not self._skip_whitespace():
            return False
        if not self._buffer.startswith(self.call[0]):
            return False if may_become(self._buffer, (self.call[0],)) else self._drop()
        self._take(len(self.call[0]))
        self._state = self._head
        return True

    def _head(self) -> bool:
        head = self.head.match(self._buffer[:_MAX_HEAD])
        if head is None:
            is_open = "{" not in self._buffer and len(self._buffer) < _MAX_HEAD
            is_open = is_open and not any(marker in self._buffer for marker in (*self.call, self.section[1]))
            return False if is_open else self._drop()
        self._take(head.end())
        assert head.lastindex is not None
        self._begin(head[head.lastindex])
        self._object = ObjectReader()
        self._state = self._object_text
        return True

    def _object_text(self) -> bool:
        return self._read_object(self._object, self._after_call_text)

    def _after_call_text(self) -> bool:
        if not self._skip_whitespace():
            return False
        closer = next((closer for closer in self._after_arguments if self._buffer.startswith(closer)), None)
        if closer in (self.call[0], self.section[1]):
            self._raw = ""
            self._take(len(closer))
            self._state = self._head if closer == self.call[0] else self._closed
        elif closer is not None:
            self._take(len(closer))
        elif may_become(self._buffer, self._after_arguments):
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

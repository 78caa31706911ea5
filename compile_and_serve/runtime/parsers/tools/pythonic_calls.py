"""Base of the formats whose calls look like Python's."""

from __future__ import annotations

import re
from typing import ClassVar

from compile_and_serve.runtime.parsers.json_scanner import to_json
from compile_and_serve.runtime.parsers.pythonic_reader import PythonicArgumentsReader
from compile_and_serve.runtime.parsers.text import find_marker, may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]{0,255})\s*\(")
_NAME_START = re.compile(r"\s*([A-Za-z_][\w.\-]{0,255}\s*)?")


class PythonicCallsParser(ToolParser):
    """Calls like name(key=value, …), in a list or one a line, after an opener. A call is known when its parenthesis is closed.

    closers: texts that may end a block. in_list: whether the calls stand between square brackets. bare: whether a list at the
    start of the output needs no opener. It must name a known tool, because the output may as well be a list for the user.
    """

    closers: ClassVar[tuple[str, ...]] = ()
    in_list: ClassVar[bool] = True
    bare: ClassVar[bool] = False

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._called = ""
        self._only_known = False
        self._has_bracket = False
        self._reader = self._new_reader()
        if self.bare:
            self._state = self._start

    def _new_reader(self) -> PythonicArgumentsReader:
        return PythonicArgumentsReader(",]" if self._has_bracket else None)

    def _start(self) -> bool:
        stripped = self._buffer.lstrip()
        if not stripped or may_become(stripped, self.openers):
            return False
        self._only_known = stripped[0] == "["
        self._state = self._bracket if self._only_known else self._text
        return True

    def _opened(self, marker: str) -> None:
        self._only_known = False
        self._state = self._bracket

    def _bracket(self) -> bool:
        if not self._skip_whitespace():
            return False
        self._has_bracket = self._buffer[0] == "["
        if self.in_list and not self._has_bracket:
            return self._drop()
        self._take(self._has_bracket)
        self._state = self._call_name
        return True

    def _call_name(self) -> bool:
        name = _NAME.match(self._buffer)
        if name is None:
            is_open = _NAME_START.fullmatch(self._buffer) is not None
            return False if is_open else self._drop()
        if self._only_known and name[1] not in self.schemas:  # a list that is no call, e.g. Markdown
            return self._drop()
        self._take(name.end())
        self._called, self._reader = name[1], self._new_reader()
        self._state = self._call_arguments
        return True

    def _call_arguments(self, *, last: bool = False) -> bool:
        reader = self._reader
        text = self._buffer[reader.length :]
        at, marker = find_marker(text, self.openers + self.closers)
        reader.feed(text if last else text[:at])
        if last or marker is not None:
            reader.end()
        if reader.arguments is None:
            if not reader.failed:
                return False
            self._take(reader.at)
            return self._drop()
        self._take(reader.at)
        try:
            arguments = to_json(reader.arguments)
        except ValueError:  # an infinite number
            return self._drop()
        self._begin(self._called)
        self._arguments(arguments)
        self._end()
        self._state = self._after_item
        return True

    def _after_item(self) -> bool:
        if not self._skip_whitespace():
            return False
        if not self._has_bracket:
            return self._after_line()
        if self._buffer[0] not in ",]":
            return self._drop()
        self._state = self._next_item if self._take(1) == "," else self._closer
        return True

    def _next_item(self) -> bool:
        if not self._skip_whitespace():
            return False
        self._state = self._after_item if self._buffer[0] == "]" else self._call_name
        return True

    def _after_line(self) -> bool:
        is_end = self._buffer.startswith(self.closers)
        if not is_end and may_become(self._buffer, self.closers):
            return False
        self._take(self._buffer[0] in ",;")
        self._state = self._closer if is_end else self._call_name
        return True

    def _closer(self) -> bool:
        if not self._skip_whitespace():
            return False
        if may_become(self._buffer, self.closers):
            return False
        at, closer = find_marker(self._buffer, self.closers)
        if closer is not None and at == 0:
            self._take(len(closer))
        self._whitespace, self._raw = self._raw[len(self._raw.rstrip()) :], ""
        self._state = self._text
        return True

    def _end_of_text(self) -> None:
        while self._state == self._call_arguments and self._call_arguments(last=True):
            while self._state():
                pass
        if self._state == self._closer:
            self._buffer = self._raw = ""
            self._state = self._text
        elif self._state == self._start:
            self._state = self._text

"""Base of the formats whose calls are JSON objects, alone or in a list."""

from __future__ import annotations

from typing import ClassVar

from compile_and_serve.runtime.parsers.json_scanner import CallReader, to_json
from compile_and_serve.runtime.parsers.text import may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser


class JsonCallsParser(ToolParser):
    """Calls like {"name": …, "arguments": …}, or lists of them, after an opener.

    closers: texts that may end a block. separators: characters that may stand between the objects of a block. bare:
    characters that begin a block without an opener at the start of the output. Such calls must name a known tool, because
    the output may as well be JSON for the user. arguments_key: of the arguments in calls that a grammar writes.
    """

    closers: ClassVar[tuple[str, ...]] = ()
    separators: ClassVar[str] = ""
    bare: ClassVar[str] = ""
    arguments_key: ClassVar[str] = "arguments"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._reader = CallReader()
        self._in_list = False
        self._only_known = False
        if self.bare:
            self._state = self._start

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {to_json(name)}, "{cls.arguments_key}": ', "}"

    def _start(self) -> bool:
        stripped = self._buffer.lstrip()
        if not stripped or may_become(stripped, self.openers):
            return False
        if stripped[0] in self.bare and not stripped.startswith(self.openers):
            self._only_known = True
            self._opened("")
        else:
            self._state = self._text
        return True

    def _opened(self, marker: str) -> None:
        if marker:
            self._only_known = False
        self._in_list = False
        self._state = self._block

    def _block(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._buffer[0] == "[" and not self._in_list:
            self._take(1)
            self._in_list = True
            return True
        return self._start_call()

    def _start_call(self) -> bool:
        if self._buffer[0] != "{":
            return self._drop()
        self._reader = CallReader()
        self._state = self._call
        return True

    def _call(self) -> bool:
        reader = self._reader
        for at, char in enumerate(self._buffer):
            is_valid = reader.push(char)
            if is_valid and not self._begun and reader.name is not None:
                is_valid = not self._only_known or reader.name in self.schemas
                if is_valid:
                    self._begin(reader.name)
            if not is_valid:
                self._take(at)
                return self._drop()
            if reader.done:
                self._take(at + 1)
                self._arguments(reader.take_arguments())
                self._end()
                self._state = self._after_item
                return True
        self._take(len(self._buffer))
        self._arguments(reader.take_arguments())
        return False

    def _after_item(self) -> bool:
        if not self._skip_whitespace():
            return False
        char = self._buffer[0]
        if self._in_list and char in ",]":
            self._take(1)
            self._in_list = char == ","
            self._state = self._block if char == "," else self._after_item
        elif self._in_list:
            self._drop()
        elif char == "{" or char in self.separators:
            self._take(char != "{")
            self._state = self._block
        elif closer := next((closer for closer in self.closers if self._buffer.startswith(closer)), None):
            self._take(len(closer))
            self._end_block()
        elif may_become(self._buffer, self.closers):
            return False
        else:
            self._end_block()
        return True

    def _end_block(self) -> None:
        self._whitespace, self._raw = self._raw[len(self._raw.rstrip()) :], ""
        self._state = self._text

    def _end_of_text(self) -> None:
        if self._state == self._start:
            self._state = self._text
        elif self._state == self._after_item and not self._begun:
            self._raw = ""  # the calls are complete; the rest is a part of a closer or whitespace
            self._buffer = "" if may_become(self._buffer, self.closers) else self._buffer
            self._state = self._text

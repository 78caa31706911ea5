"""The formats of Mistral's models."""

from __future__ import annotations

import re

from compile_and_serve.runtime.parsers.json_scanner import ObjectReader
from compile_and_serve.runtime.parsers.tools.base import Schemas
from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser

_HEAD = re.compile(r"\s*([^\s\[\]{}\"]{1,256})\s*(\[CALL_ID\][A-Za-z0-9]{0,64})?(\[ARGS\])?\s*(?=\{)")
_MAX_HEAD = 400


class MistralParser(JsonCallsParser):
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], or since version 11 of the tokenizer [TOOL_CALLS]name[ARGS]{…}, repeated."""

    name = "mistral"
    list_opener = "[TOOL_CALLS]["
    separator = ", "
    trigger = "[TOOL_CALLS]"
    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    id_length = 9

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._object = ObjectReader()

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def _start_call(self) -> bool:
        if self._in_list or self._buffer[0] == "{":
            return super()._start_call()
        head = _HEAD.match(self._buffer[:_MAX_HEAD])
        if head is None:
            is_open = len(self._buffer) < _MAX_HEAD and "{" not in self._buffer and self.openers[0] not in self._buffer
            return False if is_open else self._drop()
        self._take(head.end())
        self._begin(head[1])
        self._object = ObjectReader()
        self._state = self._named
        return True

    def _named(self) -> bool:
        return self._read_object(self._object, self._text)

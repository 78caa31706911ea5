"""Calls written as a list of Python calls (Llama 3.2 and 4, ToolACE)."""

from __future__ import annotations

import ast
import re
from typing import Any

from compile_and_serve.runtime.parsers.json_scanner import to_json
from compile_and_serve.runtime.parsers.text import may_become
from compile_and_serve.runtime.parsers.tools.base import Schemas, ToolParser

_OPENERS = ("<|python_start|>", "<|python_tag|>")
_CLOSER = "<|python_end|>"
_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]{0,255})\s*\(")
_NAME_START = re.compile(r"\s*([A-Za-z_][\w.\-]{0,255}\s*)?")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """The whole output is [name(key=value, …), …]. A call's arguments are known when its parenthesis is closed."""

    name = "pythonic"
    openers = _OPENERS
    markers = (*_OPENERS, _CLOSER)

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._called = ""
        self._source = ""
        self._quote = ""
        self._escape = False
        self._depth = 0
        self._state = self._start

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[func_name1(params_name1=params_value1" in template

    def _start(self) -> bool:
        stripped = self._buffer.lstrip()
        if not stripped or may_become(stripped, _OPENERS):
            return False
        self._state = self._bracket if stripped[0] == "[" else self._text
        return True

    def _opened(self, marker: str) -> None:
        self._state = self._bracket

    def _bracket(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._buffer[0] != "[":
            return self._drop()
        self._take(1)
        self._state = self._call_name
        return True

    def _call_name(self) -> bool:
        name = _NAME.match(self._buffer)
        if name is None:
            is_open = _NAME_START.fullmatch(self._buffer) is not None
            return False if is_open else self._drop()
        if name[1] not in self.schemas:  # a list that is no call, e.g. Markdown
            return self._drop()
        self._take(name.end())
        self._called, self._source, self._quote, self._depth = name[1], "", "", 1
        self._escape = False
        self._state = self._call_arguments
        return True

    def _call_arguments(self) -> bool:
        for at, char in enumerate(self._buffer):
            if self._is_end(char):
                self._source += self._take(at + 1)
                return self._complete()
        self._source += self._take(len(self._buffer))
        return False

    def _is_end(self, char: str) -> bool:
        if self._quote:
            if self._escape:
                self._escape = False
            elif char == "\\":
                self._escape = True
            elif char == self._quote:
                self._quote = ""
            return False
        if char in "\"'":
            self._quote = char
        self._depth += (char in "([{") - (char in ")]}")
        return self._depth == 0

    def _complete(self) -> bool:
        values = _keyword_arguments("f(" + self._source)
        if values is None:
            return self._drop()
        self._begin(self._called)
        self._arguments(to_json(values))
        self._end()
        self._state = self._after_call_text
        return True

    def _after_call_text(self) -> bool:
        if not self._skip_whitespace():
            return False
        char = self._buffer[0]
        if char not in ",]":
            return self._drop()
        self._take(1)
        self._state = self._call_name if char == "," else self._closer
        return True

    def _closer(self) -> bool:
        if may_become(self._buffer, (_CLOSER,)):
            return False
        if self._buffer.startswith(_CLOSER):
            self._take(len(_CLOSER))
        self._raw = ""
        self._state = self._text
        return True

    def _end_of_text(self) -> None:
        if self._state == self._closer:
            self._buffer = self._raw = ""
            self._state = self._text
        elif self._state == self._start:
            self._state = self._text


def _keyword_arguments(source: str) -> dict[str, Any] | None:
    """The arguments of a Python call with literal keyword arguments; None for anything else."""
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        to_json(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return values


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None), tuple)):
        raise ValueError
    return value


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError
    return node.value

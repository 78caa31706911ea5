"""JSON that arrives one character at a time: `JsonScanner` checks it, `CallReader` reads a tool call from it."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

_WHITESPACE = " \t\n\r"
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_MAX_DEPTH = 128
_MAX_NUMBER = 4300  # characters; Python reads no longer integers

_Expected = Literal["value", "value or end", "key", "key or end", "colon", "comma or end", "nothing"]


class JsonScanner:
    """Checks the characters of one JSON object or list as they come.

    depth: number of open objects and lists. complete: whether the value has ended. last_string: whether the last character
    ended a string. Nesting is limited.
    """

    __slots__ = ("_escape", "_expected", "_hex", "_in_string", "_is_key", "_stack", "_word", "complete", "last_string")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expected: _Expected = "value"
        self._word = ""  # the number or literal being read
        self._in_string = self._is_key = self._escape = False
        self._hex = 0  # hexadecimal digits that an escape still needs
        self.complete = False
        self.last_string = False

    @property
    def depth(self) -> int:
        return len(self._stack)

    @property
    def in_string(self) -> bool:
        return self._in_string

    @property
    def after_value(self) -> bool:
        """Whether a value has just ended within an object or a list."""
        return self._expected == "comma or end" and not self._word and not self._in_string

    @property
    def after_key(self) -> bool:
        """Whether a key of an object has just ended."""
        return self._expected == "colon"

    def push(self, char: str) -> bool:
        """Whether the text is still the beginning of a JSON value. After False, the scanner must not be used any more."""
        self.last_string = False
        if self._in_string:
            return self._push_string(char)
        if self._word:
            if char.isascii() and (char.isalnum() or char in "+-."):
                self._word += char
                return len(self._word) <= _MAX_NUMBER
            if not (_NUMBER.fullmatch(self._word) or self._word in _LITERALS):
                return False
            self._word = ""
        if char in _WHITESPACE:
            return True
        return self._push_token(char)

    def _push_string(self, char: str) -> bool:
        if self._hex:
            self._hex -= 1
            return char in _HEX
        if self._escape:
            self._escape = False
            self._hex = 4 if char == "u" else 0
            return char in _ESCAPES
        if char == "\\":
            self._escape = True
        elif char == '"':
            self._in_string = False
            self.last_string = True
            self._expected = "colon" if self._is_key else "comma or end"
        return True

    def _push_token(self, char: str) -> bool:
        expected = self._expected
        if self.complete:
            return False
        if char in "]}":
            return self._close(char, expected)
        if expected == "colon":
            self._expected = "value"
            return char == ":"
        if expected == "comma or end":
            self._expected = "key" if self._stack[-1] == "}" else "value"
            return char == ","
        if expected in ("key", "key or end"):
            self._in_string = self._is_key = True
            return char == '"'
        return self._open(char)

    def _open(self, char: str) -> bool:
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._expected = "key or end" if char == "{" else "value or end"
            return len(self._stack) <= _MAX_DEPTH
        if not self._stack:
            return False
        self._expected = "comma or end"
        if char == '"':
            self._in_string, self._is_key = True, False
            return True
        self._word = char
        return char.isascii() and (char.isalnum() or char == "-")

    def _close(self, char: str, expected: _Expected) -> bool:
        wanted = ("key or end", "comma or end") if char == "}" else ("value or end", "comma or end")
        if not self._stack or self._stack.pop() != char or expected not in wanted:
            return False
        self.complete = not self._stack
        self._expected = "nothing" if self.complete else "comma or end"
        return True


class ObjectReader:
    """Reads one JSON object. Control characters in its strings, which models write and JSON forbids, are escaped."""

    __slots__ = ("_scanner",)

    def __init__(self) -> None:
        self._scanner = JsonScanner()

    @property
    def done(self) -> bool:
        return self._scanner.complete

    def push(self, char: str) -> str | None:
        """The character as valid JSON; None if the text is malformed."""
        if self._scanner.depth == 0 and char != "{" and not self._scanner.complete:
            return None
        was_in_string = self._scanner.in_string
        if not self._scanner.push(char):
            return None
        return json.dumps(char)[1:-1] if was_in_string and char < " " else char


class CallReader:
    """Reads a tool call: an object with "name" and "arguments" (or "parameters"), in any order, and further keys.

    Arguments may be an object, null, or a string with the JSON text of an object. name: known as soon as its string has
    ended. `take_arguments` returns what is new of the arguments since the last call.
    """

    __slots__ = ("_arguments", "_buffer", "_has_arguments", "_key", "_mode", "_scanner", "name")

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._buffer = ""  # the key or value being read
        self._key = ""
        self._mode: Literal["none", "key", "value", "stream"] = "none"
        self._has_arguments = False
        self._arguments = ""
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._scanner.complete

    def take_arguments(self) -> str:
        """New JSON text of the arguments; empty as long as the name is unknown."""
        if self.name is None:
            return ""
        new, self._arguments = self._arguments, ""
        return new

    def push(self, char: str) -> bool:
        """Whether the text is still the beginning of a call."""
        scanner = self._scanner
        if scanner.depth == 0 and char != "{":
            return False
        was_in_string, was_after_key = scanner.in_string, scanner.after_key
        if not scanner.push(char):
            return False
        if scanner.complete:
            return self._value_ends() and self._finish()
        text = json.dumps(char)[1:-1] if was_in_string and char < " " else char
        if self._mode == "stream":
            self._arguments += text
            if scanner.depth == 1 and scanner.after_value:
                self._mode = "none"
        elif self._mode == "value":
            return self._push_value(char, text)
        elif self._mode == "key":
            self._buffer += text
            if scanner.after_key:
                self._key, self._buffer, self._mode = json.loads(self._buffer), "", "none"
        elif was_after_key and char == ":":
            self._mode = "value"
        elif scanner.in_string:
            self._buffer, self._mode = char, "key"
        return True

    def _push_value(self, char: str, text: str) -> bool:
        if not self._buffer and char == "{" and self._key in ("arguments", "parameters"):
            if self._has_arguments:
                return False
            self._has_arguments = True
            self._mode = "stream"
            self._arguments += text
            return True
        if char == "," and self._scanner.depth == 1 and not self._scanner.in_string:
            return self._value_ends()
        if self._buffer or char not in _WHITESPACE:
            self._buffer += text
        if self._scanner.last_string and self._scanner.depth == 1:
            return self._value_ends()
        return True

    def _value_ends(self) -> bool:
        if self._mode != "value":
            return True
        self._mode = "none"
        text, self._buffer = self._buffer.strip(), ""
        if self._key == "name":
            return self._set_name(_loads(text))
        if self._key in ("arguments", "parameters"):
            return self._set_arguments(text)
        return True

    def _set_name(self, value: Any) -> bool:
        if self.name is not None or not isinstance(value, str) or not value or not _is_unicode(value):
            return False
        self.name = value
        return True

    def _set_arguments(self, text: str) -> bool:
        value = _loads(text)
        if isinstance(value, str):
            value = _loads(value or "{}")
        if self._has_arguments or not (value is None or isinstance(value, dict)):
            return False
        self._has_arguments = True
        try:
            self._arguments = to_json(value or {})
        except ValueError:
            return False
        return True

    def _finish(self) -> bool:
        if self.name is None:
            return False
        if not self._has_arguments:
            self._arguments = "{}"
        return True


def to_json(value: Any) -> str:
    """JSON text of a value, which always can be encoded as UTF-8. Raises `ValueError` for infinity and NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogate, which an escape in JSON can make."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _loads(text: str) -> Any:
    """The value of JSON text; an ellipsis if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ...

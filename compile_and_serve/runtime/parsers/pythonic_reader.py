"""Arguments of a call in Python's notation that arrive in pieces, read as models write them and not only as Python allows them."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
# A step of the reader: it yields when it needs more text.
_Step = Generator[None, None, T]

_MAX_DEPTH = 64
_END = ""  # stands for the character after the last one
_CALL_ENDS = "),"  # unlike ",)", which ends the values of a tuple
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_INTEGER = re.compile(r"[+-]?[0-9](_?[0-9])*")
_NUMBER = re.compile(r"[+-]?\.?[0-9][0-9A-Za-z_.+-]*")
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[\\'\"abfnrtv])")
_LETTERS = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))


class PythonicArgumentsReader:
    """Reads `key=value, …)`, from behind the opening parenthesis of a call.

    Values are literals of Python or JSON. Strings may hold line breaks, and quotes that should have been escaped: a quote ends
    a string only if the text behind it can follow a string. Names may be words that Python reserves, and numbers may begin
    with zeros. Positional arguments are malformed, because they do not say which parameter they are for.

    after_call: characters that may follow the call; None for any.
    at: number of characters that belong to what was read. arguments: known at the end of the call. failed: the text is no call.
    """

    __slots__ = ("_after_call", "_ended", "_steps", "_text", "arguments", "at", "failed")

    def __init__(self, after_call: str | None) -> None:
        self._after_call = after_call
        self._text = ""
        self._ended = False
        self._steps = self._call()
        self.at = 0
        self.arguments: dict[str, Any] | None = None
        self.failed = False

    @property
    def length(self) -> int:
        """Number of characters that were fed."""
        return len(self._text)

    def feed(self, text: str) -> None:
        self._text += text
        self._advance()

    def end(self) -> None:
        """No text follows."""
        self._ended = True
        self._advance()

    def _advance(self) -> None:
        if self.failed or self.arguments is not None:
            return
        try:
            next(self._steps)
        except StopIteration as result:
            self.arguments = result.value
        except ValueError:
            self.failed = True

    def _peek(self, ahead: int = 0) -> _Step[str]:
        while self.at + ahead >= len(self._text):
            if self._ended:
                return _END
            yield
        return self._text[self.at + ahead]

    def _solid(self, ahead: int) -> _Step[tuple[int, str]]:
        """Distance and character of the first one that is not whitespace."""
        while (char := (yield from self._peek(ahead))).isspace():
            ahead += 1
        return ahead, char

    def _skip_whitespace(self) -> _Step[str]:
        """The next character that is not whitespace, which is not consumed."""
        ahead, char = yield from self._solid(0)
        self.at += ahead
        return char

    def _word(self) -> _Step[str]:
        start = self.at
        while (char := (yield from self._peek())).isalnum() or (char and char in "_.+-"):
            self.at += 1
        return self._text[start : self.at]

    def _comma_or(self, closer: str) -> _Step[bool]:
        """Consume a comma. Whether the closer comes instead."""
        char = yield from self._skip_whitespace()
        if char not in ("," + closer) or not char:
            raise ValueError
        self.at += char == ","
        return char == closer

    def _call(self) -> _Step[dict[str, Any]]:
        arguments: dict[str, Any] = {}
        while (yield from self._skip_whitespace()) != ")":
            name = yield from self._word()
            if not name or name in arguments or (yield from self._skip_whitespace()) != "=":
                raise ValueError
            self.at += 1
            arguments[name] = yield from self._value(_CALL_ENDS, 0)
            yield from self._comma_or(")")
        self.at += 1
        return arguments

    def _value(self, ends: str, depth: int) -> _Step[Any]:
        """ends: characters that may follow the value."""
        char = yield from self._skip_whitespace()
        if depth > _MAX_DEPTH:
            raise ValueError
        if char and char in "\"'":
            return (yield from self._string(ends, is_raw=False))
        if char == "{":
            return (yield from self._dict(depth + 1))
        if char and char in "[(":
            return (yield from self._list("]" if char == "[" else ")", depth + 1))
        word = yield from self._word()
        if word in ("r", "R", "u", "U") and (yield from self._peek()) in ("'", '"'):
            return (yield from self._string(ends, is_raw=word in "rR"))
        return _scalar(word)

    def _list(self, closer: str, depth: int) -> _Step[Any]:
        self.at += 1
        values = []
        while (yield from self._skip_whitespace()) != closer:
            values.append((yield from self._value("," + closer, depth)))
            if (yield from self._comma_or(closer)) and closer == ")" and len(values) == 1:
                self.at += 1
                return values[0]  # a value in parentheses
        self.at += 1
        return values

    def _dict(self, depth: int) -> _Step[dict[Any, Any]]:
        self.at += 1
        values = {}
        while (yield from self._skip_whitespace()) != "}":
            key = yield from self._value(":", depth)
            if isinstance(key, (list, dict)) or (yield from self._skip_whitespace()) != ":":
                raise ValueError
            self.at += 1
            values[key] = yield from self._value(",}", depth)
            yield from self._comma_or("}")
        self.at += 1
        return values

    def _string(self, ends: str, *, is_raw: bool) -> _Step[str]:
        """A string, and those that follow it on lines of their own, which Python joins."""
        whole = ""
        while True:
            quote = yield from self._peek()
            is_triple = (yield from self._peek(1)) == quote and (yield from self._peek(2)) == quote
            text = yield from self._string_body(quote, ends, is_triple=is_triple)
            whole += text if is_raw else _unescaped(text)
            char = yield from self._skip_whitespace()
            if not char or char not in "\"'":
                return whole

    def _string_body(self, quote: str, ends: str, *, is_triple: bool) -> _Step[str]:
        size = 3 if is_triple else 1
        self.at += size
        start = self.at
        while True:
            char = yield from self._peek()
            if char == _END:
                raise ValueError
            if char == quote and (yield from self._closes(quote, ends, is_triple=is_triple)):
                self.at += size
                return self._text[start : self.at - size]
            self.at += 1
            if char == "\\" and (yield from self._peek()):
                self.at += 1

    def _closes(self, quote: str, ends: str, *, is_triple: bool) -> _Step[bool]:
        """Whether the quote at this place ends the string."""
        if is_triple:
            is_end = (yield from self._peek(1)) == quote and (yield from self._peek(2)) == quote
            return is_end and (yield from self._peek(3)) != quote
        ahead, char = yield from self._solid(1)
        if char and char in "\"'":
            return "\n" in self._text[self.at + 1 : self.at + ahead]  # the next string that Python joins
        if char == _END or char == ":" or char not in ends:
            return char in ends
        ahead, following = yield from self._solid(ahead + 1)
        if following == _END:
            return True
        if char == "," and ends == _CALL_ENDS:
            return following == ")" or (yield from self._is_name(ahead))
        if char == ",":
            return (following in "}\"'-" or following.isdigit()) if ends == ",}" else following in "]){[('\"+-." or following.isalnum()
        if ends == _CALL_ENDS:
            return self._after_call is None or following in self._after_call
        return following in ",)]}:"

    def _is_name(self, ahead: int) -> _Step[bool]:
        """Whether `name=` begins there."""
        start = ahead
        while (char := (yield from self._peek(ahead))).isalnum() or (char and char in "_.-"):
            ahead += 1
        if ahead == start:
            return False
        _, char = yield from self._solid(ahead)
        return char in ("=", _END)


def _scalar(word: str) -> Any:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _INTEGER.fullmatch(word):
        return int(word)
    if not _NUMBER.fullmatch(word):
        raise ValueError
    return int(word, 0) if word.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else float(word)


def _unescaped(text: str) -> str:
    """The text that a string's source stands for. What is no escape stays, as in Python; a backslash at a line's end does too."""
    text = _ESCAPE.sub(_character, text)
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # joins pairs of surrogates, which JSON writes
    except UnicodeDecodeError:
        return text


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if code in _LETTERS:
        return _LETTERS[code]
    value = int(code, 8) if code[0].isdigit() else int(code[1:], 16)
    if value > 0x10FFFF:
        raise ValueError
    return chr(value)

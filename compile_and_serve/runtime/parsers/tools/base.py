"""`ToolParser`: finds tool calls in generated text. There is one subclass per format."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from compile_and_serve.runtime.parsers.events import CallArguments, CallBegin, CallDropped, CallEnd, Content, Event
from compile_and_serve.runtime.parsers.json_scanner import ObjectReader
from compile_and_serve.runtime.parsers.text import find_marker

Schemas = Mapping[str, Mapping[str, Any]]


class ToolParser(ABC):
    """A state machine from text to events. `feed` takes the next text and `finish` ends it; neither ever raises.

    The events depend only on the text, not on how it is divided. Malformed calls become content (`CallDropped`), and the text
    after them is searched again. Whitespace around calls is dropped.

    A subclass sets `openers` and implements `_opened`. A state is a method that consumes a part of `_buffer` and returns
    whether to go on; False means that more text is needed.

    name: of the format. openers: texts that begin a call or a block of calls. markers: all texts that the parser must see,
    even where they are special tokens. id_length: length of the ids of calls, for models whose templates demand one.
    list_opener, list_closer: texts around all calls; list_opener is empty if calls stand alone. separator: text between calls.
    trigger: text that only begins calls; empty if there is none.
    was_cut: set before `finish`: the output ended because it reached its limit.
    """

    name: ClassVar[str] = ""
    openers: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    id_length: ClassVar[int | None] = None
    list_opener: ClassVar[str] = ""
    list_closer: ClassVar[str] = "]"
    separator: ClassVar[str] = "\n"
    trigger: ClassVar[str] = ""
    was_cut = False

    def __init__(self, schemas: Schemas) -> None:
        """schemas: name of each tool → JSON schema of its parameters."""
        self.schemas = schemas
        self._buffer = ""
        self._raw = ""  # the text since the end of the last call, or since the opener
        self._whitespace = ""  # content that is dropped if a call follows
        self._after_call = False
        self._begun = False
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._text

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether a chat template uses this format."""
        return False

    @classmethod
    def call_format(cls, name: str) -> tuple[str, str] | None:
        """Text before and after the arguments in a call of the tool `name`, for grammars; None if there is none."""
        return None

    @classmethod
    def call_id(cls, name: str, index: int) -> str | None:
        """The id of a call, for models whose chat template shows it; None: any. index: calls before it in the conversation."""
        return None

    def feed(self, text: str) -> list[Event]:
        """The events that the next text completes."""
        self._buffer += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The events of the end. A call that is not complete is malformed.

        Of an output that was cut, the beginning of a call whose name is not known yet is left out: it is no content.
        """
        self._end_of_text()
        text, self._buffer = self._buffer, ""
        if self._state == self._text:
            self._content("" if self.was_cut and self._may_begin_a_call(text) else text)
            if self._whitespace and not self._after_call:
                self._events.append(Content(self._whitespace))
        elif self._raw:
            self._raw += text
            self._drop()
        events, self._events = self._events, []
        match events[-1:]:
            case [CallDropped(dropped, False)] if self.was_cut and self._may_begin_a_call(dropped.lstrip()):
                events.pop()
        return events

    def _may_begin_a_call(self, text: str) -> bool:
        """Whether text is a part of an opener, or begins with one. Code blocks may begin calls, but also content."""
        openers = [opener for opener in self.openers if not opener.startswith("```")]
        return text != "" and any(text.startswith(opener) or opener.startswith(text) for opener in openers)

    def _end_of_text(self) -> None:  # noqa: B027 (most formats need none)
        """Called before the last events are made."""

    @abstractmethod
    def _opened(self, marker: str) -> None:
        """Set the state after an opener."""

    def _text(self) -> bool:
        at, marker = find_marker(self._buffer, self.openers)
        self._content(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if marker is None:
            return False
        self._raw, self._whitespace = self._whitespace, ""
        self._take(len(marker))
        self._opened(marker)
        return True

    def _content(self, text: str) -> None:
        text = self._whitespace + text
        shown = text.rstrip()
        self._whitespace = text[len(shown) :]
        if shown:
            self._after_call = False
            self._events.append(Content(shown))

    def _take(self, count: int) -> str:
        """Consume the first characters of the buffer."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._raw += taken
        return taken

    def _skip_whitespace(self) -> bool:
        """Whether the buffer then has a character."""
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        return bool(self._buffer)

    def _begin(self, name: str) -> None:
        self._begun = True
        self._events.append(CallBegin(name))

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def _read_object(self, reader: ObjectReader, after: Callable[[], bool]) -> bool:
        """A state that reads the arguments of the open call. after: the state after the call."""
        parts: list[str] = []
        for at, char in enumerate(self._buffer):
            text = reader.push(char)
            if text is None:
                self._take(at)
                return self._drop()
            parts.append(text)
            if reader.done:
                self._take(at + 1)
                self._arguments("".join(parts))
                self._end()
                self._state = after
                return True
        self._take(len(self._buffer))
        self._arguments("".join(parts))
        return False

    def _end(self) -> None:
        self._events.append(CallEnd())
        self._begun, self._raw, self._after_call = False, "", True

    def _drop(self) -> bool:
        """Return the text since the last call as content, and continue with text."""
        if self._raw or self._begun:
            self._events.append(CallDropped(self._raw, self._begun))
        self._begun, self._raw, self._after_call = False, "", False
        self._state = self._text
        return True


def mentions(template: str, *texts: str) -> bool:
    """Whether a template contains all texts."""
    return all(text in template for text in texts)


def uses_tools(template: str) -> bool:
    """Whether a chat template knows the variable `tools`."""
    return re.search(r"\btools\b", template) is not None

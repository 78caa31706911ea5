"""`ReasoningParser`: splits generated text into reasoning and content. Subclasses name the markers of the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from compile_and_serve.runtime.parsers.events import Content, Event, Reasoning
from compile_and_serve.runtime.parsers.text import find_marker, may_become


class ReasoningParser:
    """A state machine: reasoning between a start and an end marker at the beginning of the output, then content.

    The events depend only on the text, not on how it is divided. Whitespace around the markers is dropped. Reasoning that
    does not end stays reasoning.

    name: of the format. starts, ends: the markers. markers: all texts that the parser must see, even where they are special
    tokens. opened_by_default: without a start marker the output begins with reasoning. interrupts: texts that end reasoning
    without an end marker, and belong to the content. parses_tools: it finds tool calls too.
    was_cut: set before `finish`: the output ended because it reached its limit.
    """

    name: ClassVar[str] = ""
    starts: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    opened_by_default: ClassVar[bool] = False
    interrupts: ClassVar[tuple[str, ...]] = ()
    parses_tools: ClassVar[bool] = False
    was_cut = False

    def __init__(self, prompt: str) -> None:
        """prompt: the rendered conversation, whose end may already open or close the reasoning."""
        self.in_reasoning = False
        self._buffer = ""
        self._whitespace = ""
        self._state: Callable[[], list[Event] | None] = self._start
        tail = prompt.rstrip()
        if tail.endswith(self.ends):
            self._state = self._content
        elif tail.endswith(self.starts):
            self._enter()

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether a chat template uses this format."""
        return False

    @classmethod
    def end_texts(cls) -> tuple[str, ...]:
        """Texts after which the content begins, for grammars."""
        return cls.ends

    @classmethod
    def begins_with_reasoning(cls, prompt: str) -> bool:
        """Whether an output after this prompt is expected to begin with reasoning."""
        return not prompt.rstrip().endswith(cls.ends)

    def feed(self, text: str) -> list[Event]:
        """The events that the next text completes."""
        self._buffer += text
        events: list[Event] = []
        while (new := self._state()) is not None:
            events += new
        return events

    def finish(self) -> list[Event]:
        """The events of the end. Of an output that was cut, a part of a marker is left out."""
        text, self._buffer = self._buffer, ""
        if not text or (self.was_cut and may_become(text.lstrip(), self.ends if self.in_reasoning else self.starts)):
            return []
        if self.in_reasoning:
            return self._shown(text)
        return [Content(text)]

    def _enter(self) -> None:
        self.in_reasoning = True
        self._state = self._reasoning_head

    def _start(self) -> list[Event] | None:
        stripped = self._buffer.lstrip()
        if not stripped or may_become(stripped, self.starts):
            return None
        start = next((start for start in self.starts if stripped.startswith(start)), None)
        if start is not None:
            self._buffer = stripped[len(start) :]
            self._enter()
        elif self.opened_by_default:
            self._enter()
        else:
            self._state = self._content
        return []

    def _reasoning_head(self) -> list[Event] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._state = self._reasoning
        return []

    def _reasoning(self) -> list[Event] | None:
        at, marker = find_marker(self._buffer, self.ends + self.interrupts)
        events = self._shown(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if marker is None:
            return events or None
        if marker in self.ends:
            self._buffer = self._buffer[len(marker) :]
        self.in_reasoning = False
        self._state = self._content_head
        return events

    def _shown(self, text: str) -> list[Event]:
        text = self._whitespace + text
        shown = text.rstrip()
        self._whitespace = text[len(shown) :]
        return [Reasoning(shown)] if shown else []

    def _content_head(self) -> list[Event] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._state = self._content
        return []

    def _content(self) -> list[Event] | None:
        text, self._buffer = self._buffer, ""
        return [Content(text)] if text else None

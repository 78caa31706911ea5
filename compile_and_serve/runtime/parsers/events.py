"""The events that parsers find in generated text, and `ParsedMessage`, which collects them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the open call's arguments, which are JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The open call is complete: its arguments are a JSON object."""


@dataclass(frozen=True, slots=True)
class CallDropped:
    """The text since the last call is malformed.

    text: that text, as generated. begun: whether its `CallBegin` was sent, so that a stream already has parts of `text`.
    """

    text: str
    begun: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd | CallDropped


@dataclass(slots=True)
class Call:
    """A complete tool call. arguments: JSON text of an object."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """The message of a whole text. Malformed calls are part of the content."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    _open: Call | None = None

    def add(self, events: Iterable[Event]) -> ParsedMessage:
        """Append events. Returns the message itself."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(name):
                    self._open = Call(name)
                case CallArguments(text):
                    assert self._open is not None
                    self._open.arguments += text
                case CallEnd():
                    assert self._open is not None
                    self.calls.append(self._open)
                    self._open = None
                case CallDropped(text):
                    self.content += text
                    self._open = None
        return self

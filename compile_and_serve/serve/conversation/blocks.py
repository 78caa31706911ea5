"""Parser events as blocks: runs of reasoning, text or one tool call. OpenAI's Responses and Anthropic's messages consist of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from compile_and_serve.runtime.parsers.events import CallArguments, CallBegin, CallDropped, CallEnd, Content, Event, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class BlockBegin:
    """A block begins. name: of the called function."""

    kind: Kind
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlockText:
    """The next part of the open block's text; of a call, its arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The open block ends. complete: false if the output ended within it, and for a malformed call."""

    complete: bool


BlockEvent = BlockBegin | BlockText | BlockEnd


class Blocks:
    """Divides the parser events of one completion into blocks. Text of whitespace only, between other blocks, is left out.

    has_calls: whether a call was complete.
    """

    def __init__(self, *, with_reasoning: bool = True) -> None:
        self.has_calls = False
        self._with_reasoning = with_reasoning
        self._open: Kind | None = None
        self._is_empty = True
        self._whitespace = ""

    def feed(self, events: Iterable[Event]) -> list[BlockEvent]:
        """The block events of some parser events."""
        found: list[BlockEvent] = []
        for event in events:
            match event:
                case Reasoning(text) if self._with_reasoning:
                    self._append(found, "reasoning", text)
                case Content(text) | CallDropped(text, False):
                    self._append_content(found, text)
                case CallBegin(name):
                    self._begin(found, "call", name)
                case CallArguments(text):
                    self._append(found, "call", text)
                case CallEnd():
                    self.has_calls = True
                    self._end(found, complete=True)
                case CallDropped():
                    self._end(found, complete=False)
        return found

    def finish(self, *, complete: bool) -> list[BlockEvent]:
        """The last events. complete: whether the output was not cut off."""
        found: list[BlockEvent] = []
        if self._is_empty and self._whitespace:
            self._append(found, "text", self._whitespace)
        self._end(found, complete=complete)
        return found

    def _append_content(self, found: list[BlockEvent], text: str) -> None:
        if self._open != "text":
            self._whitespace += text
            if not self._whitespace.strip():
                return
            text, self._whitespace = self._whitespace, ""
        self._append(found, "text", text)

    def _append(self, found: list[BlockEvent], kind: Kind, text: str) -> None:
        if not text:
            return
        if self._open != kind:
            self._begin(found, kind)
        if found and isinstance(found[-1], BlockText):
            found[-1] = BlockText(found[-1].text + text)
        else:
            found.append(BlockText(text))

    def _begin(self, found: list[BlockEvent], kind: Kind, name: str = "") -> None:
        self._end(found, complete=True)
        self._open, self._is_empty, self._whitespace = kind, False, ""
        found.append(BlockBegin(kind, name))

    def _end(self, found: list[BlockEvent], *, complete: bool) -> None:
        if self._open is not None:
            self._open = None
            found.append(BlockEnd(complete))

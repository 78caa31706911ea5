"""gpt-oss' harmony format: messages in channels, which hold reasoning, content and tool calls."""

from __future__ import annotations

import re
from typing import ClassVar

from compile_and_serve.runtime.parsers.events import CallArguments, CallBegin, CallDropped, CallEnd, Content, Event, Reasoning
from compile_and_serve.runtime.parsers.json_scanner import ObjectReader
from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser
from compile_and_serve.runtime.parsers.text import find_marker

_MESSAGE = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_MAX_HEAD = 1000
_FUNCTION = re.compile(r"to=functions\.([^\s<]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(ReasoningParser):
    """Channel analysis is reasoning; final, and commentary without a recipient, are content; commentary to functions.NAME is a call."""

    name = "gpt-oss"
    ends = ("<|end|>",)
    markers = ("<|start|>", "<|channel|>", _MESSAGE, "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
    parses_tools: ClassVar[bool] = True

    def __init__(self, prompt: str) -> None:
        super().__init__("")
        self._raw = ""
        self._call: ObjectReader | None = None
        self._state = self._head

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|channel|>analysis" in template and _MESSAGE in template

    @classmethod
    def end_texts(cls) -> tuple[str, ...]:
        return ("<|channel|>final<|message|>",)

    @classmethod
    def begins_with_reasoning(cls, prompt: str) -> bool:
        return True

    def finish(self) -> list[Event]:
        text, self._buffer = self._buffer, ""
        if self._state == self._head:
            return [Content(text)] if text.strip() and not text.startswith(("<|start|>", "<|channel|>")) else []
        return [*self._body_text(text), *self._end_body()]

    def _head(self) -> list[Event] | None:
        text = self._buffer.lstrip()
        may_be_head = not text or text[0] == "<" or "to=".startswith(text[:3])
        at = self._buffer.find(_MESSAGE)
        if may_be_head and at < 0 and len(self._buffer) < _MAX_HEAD:
            return None
        if not may_be_head or at < 0 or at + len(_MESSAGE) > _MAX_HEAD:
            self._state = self._body  # no head: the model left the format
            return []
        head, self._buffer = self._buffer[:at], self._buffer[at + len(_MESSAGE) :]
        events: list[Event] = []
        function, channel = _FUNCTION.search(head), _CHANNEL.search(head)
        if function is not None:
            self._call, self._raw = ObjectReader(), ""
            events.append(CallBegin(function[1]))
        self.in_reasoning = function is None and (channel is None or channel[1] == "analysis" or "to=" in head)
        self._state = self._body
        return events

    def _body(self) -> list[Event] | None:
        at, marker = find_marker(self._buffer, _BODY_ENDS)
        events = self._body_text(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if marker is None:
            return events or None
        if marker in ("<|end|>", "<|return|>", "<|call|>"):
            self._buffer = self._buffer[len(marker) :]
        events += self._end_body()
        self._state = self._head
        return events

    def _body_text(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._call is None:
            return [Reasoning(text) if self.in_reasoning else Content(text)]
        parts: list[str] = []
        for at, char in enumerate(text):
            self._raw += char
            part = self._call.push(char)
            if part is None:
                self._call = None
                return [CallDropped(self._raw, True), *self._body_text(text[at + 1 :])]
            parts.append(part)
        return [CallArguments("".join(parts))]

    def _end_body(self) -> list[Event]:
        call, self._call = self._call, None
        self.in_reasoning = False
        if call is None:
            return []
        return [CallEnd()] if call.done else [CallDropped(self._raw, True)]

"""Hunyuan-A13B's reasoning, after which the content has tags, too."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.events import Content, Event
from compile_and_serve.runtime.parsers.reasoning.think import ThinkParser
from compile_and_serve.runtime.parsers.text import find_marker, may_become

_ANSWER, _ANSWER_END = "<answer>", "</answer>"


class HunyuanA13bParser(ThinkParser):
    """<think>…</think><answer>…</answer>. The tags of the answer and the whitespace beside them are dropped."""

    name = "hunyuan_a13b"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<answer>" in template and "</think>" in template

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self._expect_answer()

    def _start(self) -> list[Event] | None:
        events = super()._start()
        self._expect_answer()
        return events

    def _expect_answer(self) -> None:
        if self._state == self._content:  # the model does not think
            self._state = self._content_head

    def finish(self) -> list[Event]:
        if self.in_reasoning:
            return super().finish()
        text, self._buffer = self._buffer, ""
        text = self._whitespace + text if self._state == self._answer else text
        return [Content(text)] if text else []

    def _content_head(self) -> list[Event] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer or may_become(self._buffer, (_ANSWER,)):
            return None
        if not self._buffer.startswith(_ANSWER):
            self._state = self._content
            return []
        self._buffer = self._buffer[len(_ANSWER) :]
        self._whitespace = ""
        self._state = self._answer_head
        return []

    def _answer_head(self) -> list[Event] | None:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return None
        self._state = self._answer
        return []

    def _answer(self) -> list[Event] | None:
        at, marker = find_marker(self._buffer, (_ANSWER_END,))
        text, self._buffer = self._whitespace + self._buffer[:at], self._buffer[at:]
        shown = text.rstrip()
        self._whitespace = text[len(shown) :]
        events: list[Event] = [Content(shown)] if shown else []
        if marker is None:
            return events or None
        self._buffer, self._whitespace = self._buffer[len(marker) :], ""
        self._state = super()._content_head
        return events

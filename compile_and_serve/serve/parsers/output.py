"""`OutputParser`: reasoning and tool calls of one completion."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.serve.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from compile_and_serve.serve.parsers.reasoning.base import ReasoningParser
from compile_and_serve.serve.parsers.tools.base import ToolParser


class OutputParser:
    """Passes text to a reasoning parser, and the content that it finds to a tool parser.

    end_ids: tokens that are the reasoning's end marker. calls: whether calls that a reasoning parser finds are events.
    num_reasoning_tokens: tokens up to the end of the reasoning, markers included.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, end_ids: Sequence[int] = (), calls: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._end_ids = frozenset(end_ids)
        self._calls = calls
        self.num_reasoning_tokens = 0

    def feed(self, text: str, token_ids: Sequence[int], *, last: bool) -> list[Event]:
        """The events that the next piece completes. token_ids: of the piece. last: no other piece follows."""
        parser = self._reasoning
        if parser is None:
            return self._find_calls([Content(text)], last=last)
        was_open = parser.in_reasoning
        events = parser.feed(text)
        if was_open or parser.in_reasoning or any(isinstance(event, Reasoning) for event in events):
            at = next((at for at, token_id in enumerate(token_ids) if token_id in self._end_ids), None)
            if at is not None:
                self.num_reasoning_tokens += at + 1
            elif parser.in_reasoning or not self._end_ids:
                self.num_reasoning_tokens += len(token_ids)
        if last:
            events += parser.finish()
        return self._find_calls(events, last=last)

    def _find_calls(self, events: list[Event], *, last: bool) -> list[Event]:
        if self._tools is None:
            is_call = (CallBegin, CallArguments, CallEnd)
            return [event for event in events if not isinstance(event, is_call) or self._calls]
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                found += self._tools.feed(event.text)
            else:
                found.append(event)
        if last:
            found += self._tools.finish()
        return found

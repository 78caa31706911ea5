"""`OutputParser`: reasoning and tool calls of one completion."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.parsers.events import CallArguments, CallBegin, CallDropped, CallEnd, Content, Event, Reasoning
from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser
from compile_and_serve.runtime.parsers.tools.base import ToolParser


class OutputParser:
    """Passes text to a reasoning parser, and the content that it finds to a tool parser.

    calls: whether calls are events; otherwise those that a reasoning parser finds are left out. max_calls: later calls are
    left out. end_ids: tokens that are the reasoning's end marker.
    num_reasoning_tokens: tokens up to the end of the reasoning, markers included.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        calls: bool,
        end_ids: Sequence[int] = (),
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._end_ids = frozenset(end_ids)
        self._left = None if calls else 0
        if calls and max_calls is not None:
            self._left = max_calls
        self._undecided = 0
        self.num_reasoning_tokens = 0

    def feed(self, text: str, token_ids: Sequence[int], *, last: bool, cut: bool = False) -> list[Event]:
        """The events that the next piece completes.

        token_ids: of the piece. last: no other piece follows. cut: because the output reached its limit.
        """
        parser = self._reasoning
        for one in (self._reasoning, self._tools):
            if cut and one is not None:
                one.was_cut = True
        if parser is None:
            return self._limited(self._find_calls([Content(text)], last=last))
        was_open = parser.in_reasoning
        events = parser.feed(text)
        if was_open or parser.in_reasoning or any(isinstance(event, Reasoning) for event in events):
            self._count_reasoning(token_ids, is_open=parser.in_reasoning)
        elif not events:
            self._undecided += len(token_ids)  # perhaps a part of a start marker
        else:
            self._undecided = 0
        if last:
            events += parser.finish()
        return self._limited(self._find_calls(events, last=last))

    def _count_reasoning(self, token_ids: Sequence[int], *, is_open: bool) -> None:
        at = next((at for at, token_id in enumerate(token_ids) if token_id in self._end_ids), None)
        if at is not None:
            self.num_reasoning_tokens += self._undecided + at + 1
        elif is_open or not self._end_ids:
            self.num_reasoning_tokens += self._undecided + len(token_ids)
        self._undecided = 0

    def _find_calls(self, events: list[Event], *, last: bool) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                found += self._tools.feed(event.text)
            else:
                found.append(event)
        if last:
            found += self._tools.finish()
        return found

    def _limited(self, events: list[Event]) -> list[Event]:
        if self._left is None:
            return events
        kept: list[Event] = []
        for event in events:
            is_call = isinstance(event, (CallBegin, CallArguments, CallEnd))
            is_call = is_call or (isinstance(event, CallDropped) and event.begun)
            if not is_call or self._left > 0:
                kept.append(event)
            self._left -= isinstance(event, CallEnd) and self._left > 0
        return kept

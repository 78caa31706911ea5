"""`EventReader`: finds reasoning and tool calls in the text of a completion."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.messages import FinishReason
from compile_and_serve.runtime.parsers.events import Content, Event
from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.tools.tool_use import ToolUse
from compile_and_serve.serve.protocol.usage import Usage


class EventReader:
    """Turns the text of one completion into parser events, and counts its reasoning tokens.

    is_plain: there is nothing to find, so all text is content.
    """

    def __init__(self, parsers: Parsers, text: str, tools: ToolUse, usage: Usage) -> None:
        """text: the rendered conversation."""
        self._parser = parsers.output_parser(text, tools.parser, tools.schemas, max_calls=None if tools.parallel else 1)
        self._usage = usage

    @property
    def is_plain(self) -> bool:
        return self._parser is None

    def feed(self, text: str, token_ids: Sequence[int], finish_reason: FinishReason | None) -> list[Event]:
        """The events that the next piece completes. finish_reason: of the last piece."""
        parser = self._parser
        if parser is None:
            return [Content(text)] if text else []
        counted = parser.num_reasoning_tokens
        events = parser.feed(text, token_ids, last=finish_reason is not None, cut=finish_reason == "length")
        if self._usage.reasoning_tokens is not None:
            self._usage.reasoning_tokens += parser.num_reasoning_tokens - counted
        return events

"""Turns parser events into the message of a chat completion, whole or as stream deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from compile_and_serve.runtime.messages import FinishReason
from compile_and_serve.runtime.parsers.events import (
    CallArguments,
    CallBegin,
    CallDropped,
    CallEnd,
    Content,
    Event,
    ParsedMessage,
    Reasoning,
)
from compile_and_serve.runtime.parsers.tools.base import ToolParser

# OpenAI's fields that this server never fills; typed clients may look for them.
_NEVER: dict[str, Any] = {"refusal": None, "annotations": None, "audio": None, "function_call": None}


class CallIds:
    """Makes the ids of the calls of one completion.

    parser: some formats demand ids of a form; None: no format. num_earlier: calls that the conversation already has.
    """

    def __init__(self, parser: type[ToolParser] | None, num_earlier: int) -> None:
        self._parser, self._index = parser, num_earlier

    def new(self, name: str, *, prefix: str = "call") -> str:
        """The id of a call of the tool `name`. prefix: of ids that have the API's form."""
        parser, index = self._parser, self._index
        self._index += 1
        own = None if parser is None else parser.call_id(name, index)
        if own is not None:
            return own
        length = None if parser is None else parser.id_length
        return f"{prefix}_{uuid.uuid4().hex[:24]}" if length is None else uuid.uuid4().hex[:length]


def whole_message(
    message: ParsedMessage, finish_reason: FinishReason | None, *, with_reasoning: bool, ids: CallIds
) -> tuple[dict[str, Any], str | None]:
    """The fields of the message, and the finish reason. As in vLLM, tool_calls is left out where there are none."""
    calls = [
        {"id": ids.new(call.name), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]
    content = message.content if message.content or not (calls or message.reasoning) else None
    reasoning = (message.reasoning or None) if with_reasoning else None
    reason = "tool_calls" if calls and finish_reason == "stop" else finish_reason
    fields: dict[str, Any] = {"content": content, **_NEVER, "reasoning": reasoning}
    return fields | ({"tool_calls": calls} if calls else {}), reason


class MessageDeltas:
    """Turns the events of one completion into OpenAI's deltas. A call's first delta has its id and name."""

    def __init__(self, *, with_reasoning: bool, ids: CallIds) -> None:
        self._with_reasoning = with_reasoning
        self._ids = ids
        self._index = -1
        self._has_calls = False

    def deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The deltas of some events. Adjacent texts of a kind are merged."""
        deltas: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content(text) | CallDropped(text, False):
                    self._append(deltas, "content", text)
                case Reasoning(text):
                    if self._with_reasoning:
                        self._append(deltas, "reasoning", text)
                case CallBegin(name):
                    self._index += 1
                    head = {"index": self._index, "id": self._ids.new(name), "type": "function"}
                    deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
                case CallArguments(text):
                    deltas.append({"tool_calls": [{"index": self._index, "function": {"arguments": text}}]})
                case CallEnd():
                    self._has_calls = True
        return deltas

    def finish_reason(self, reason: FinishReason) -> str:
        """The finish reason of the completion, after all events."""
        return "tool_calls" if self._has_calls and reason == "stop" else reason

    @staticmethod
    def _append(deltas: list[dict[str, Any]], key: str, text: str) -> None:
        if deltas and key in deltas[-1]:
            deltas[-1][key] += text
        elif text:
            deltas.append({key: text})

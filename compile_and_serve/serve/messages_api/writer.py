"""Parser events as the events and the message of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from compile_and_serve.runtime.parsers.events import Event
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.conversation.blocks import BlockBegin, BlockEnd, BlockEvent, Blocks, BlockText
from compile_and_serve.serve.conversation.conversation import Conversation
from compile_and_serve.serve.errors import ApiError, ShuttingDownError, anthropic_error_body
from compile_and_serve.serve.http.responses import named_event
from compile_and_serve.serve.protocol.usage import Usage


class MessageWriter:
    """Writes one message: thinking, text and tool_use blocks."""

    def __init__(self, conversation: Conversation, *, with_thinking: bool) -> None:
        self._usage = conversation.usage
        self._ids = conversation.call_ids()
        self._blocks = Blocks(with_reasoning=with_thinking)
        self._content: list[dict[str, Any]] = []
        self._text = ""  # of the open block
        self._message: dict[str, Any] = {
            "id": conversation.request_id,
            "type": "message",
            "role": "assistant",
            "model": conversation.model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> bytes:
        """The head of a stream."""
        message = {**self._message, "usage": usage_of(self._usage)}
        return named_event("message_start", message=message)

    def write(self, events: Sequence[Event], output: CompletionDelta | CompletionOutput) -> bytes:
        """The events of some parser events."""
        return self._write(self._blocks.feed(events))

    def finish(self, output: CompletionDelta | CompletionOutput) -> bytes:
        """The end of a stream."""
        if output.finish_reason == "abort":
            return self.fail(ShuttingDownError())
        parts = self._write(self._blocks.finish(complete=output.finish_reason == "stop"))
        reason, sequence = "end_turn", None
        if output.finish_reason in ("length", "repetition"):
            reason = "max_tokens"
        elif isinstance(output.stop_reason, str):
            reason, sequence = "stop_sequence", output.stop_reason
        elif self._blocks.has_calls:
            reason = "tool_use"
        self._message |= {"stop_reason": reason, "stop_sequence": sequence}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return parts + named_event("message_delta", delta=delta, usage=usage_of(self._usage)) + named_event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return named_event("error", error=anthropic_error_body(error.status, error.message)["error"])

    def answer(self) -> dict[str, Any]:
        """The whole message."""
        return {**self._message, "usage": usage_of(self._usage)}

    def _write(self, events: Iterable[BlockEvent]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            match event:
                case BlockBegin(kind, name):
                    block = self._new_block(kind, name)
                    self._text = ""
                    # A copy, because the block is filled later.
                    parts.append(named_event("content_block_start", index=len(self._content), content_block=dict(block)))
                    self._content.append(block)
                case BlockText(text):
                    self._text += text
                    parts.append(named_event("content_block_delta", index=len(self._content) - 1, delta=self._delta(text)))
                case BlockEnd():
                    self._close_block()
                    parts.append(named_event("content_block_stop", index=len(self._content) - 1))
        return b"".join(parts)

    def _new_block(self, kind: str, name: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if kind == "text":
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": self._ids.new(name, prefix="toolu"), "name": name, "input": {}}

    def _delta(self, text: str) -> dict[str, Any]:
        match self._content[-1]["type"]:
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case "text":
                return {"type": "text_delta", "text": text}
            case _:
                return {"type": "input_json_delta", "partial_json": text}

    def _close_block(self) -> None:
        block = self._content[-1]
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(self._text or "{}")
            except ValueError:
                block["input"] = {}  # a stream's call that was cut off; a whole answer has it as text
        else:
            block[block["type"]] = self._text


def usage_of(usage: Usage) -> dict[str, Any]:
    """Anthropic's `usage`, whose input_tokens are those that were not cached."""
    cached = usage.shown_cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }

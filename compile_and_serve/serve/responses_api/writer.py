"""Parser events as the events and the response of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from compile_and_serve.runtime.parsers.events import Event
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.conversation.blocks import BlockBegin, BlockEnd, BlockEvent, Blocks, BlockText
from compile_and_serve.serve.conversation.conversation import Conversation
from compile_and_serve.serve.errors import ApiError, ShuttingDownError
from compile_and_serve.serve.http.responses import named_event
from compile_and_serve.serve.protocol.client_parts import custom_input
from compile_and_serve.serve.protocol.client_tools import custom_names, namespaces
from compile_and_serve.serve.protocol.responses_api import ResponsesRequest
from compile_and_serve.serve.protocol.usage import Usage
from compile_and_serve.serve.responses_api.text_logprobs import TextLogprobs
from compile_and_serve.serve.responses_api.translate import new_id

# Item type → the prefix of its events' names, and the type of its content part.
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Writes one response: reasoning, message and function_call items. Every event carries the next sequence number."""

    def __init__(self, conversation: Conversation, body: ResponsesRequest, *, is_stored: bool) -> None:
        self._usage = conversation.usage
        self._ids = conversation.call_ids()
        self._blocks = Blocks()
        self._custom = custom_names(body.tools)
        self._namespaces = namespaces(body.tools)
        self._output: list[dict[str, Any]] = []
        self._text = ""  # of the open item
        self._text_logprobs: list[dict[str, Any]] = []  # of the open item
        self._logprobs = _logprobs_of(conversation)
        self._sequence_number = 0
        self._response = _head(conversation, body, is_stored=is_stored) | {"output": self._output}

    def begin(self) -> bytes:
        """The head of a stream."""
        return self._response_event("response.created") + self._response_event("response.in_progress")

    def write(self, events: Sequence[Event], output: CompletionDelta | CompletionOutput) -> bytes:
        """The events of some parser events."""
        if self._logprobs is not None:
            self._logprobs.add(output)
        return self._write(self._blocks.feed(events))

    def finish(self, output: CompletionDelta | CompletionOutput) -> bytes:
        """The end of a stream."""
        is_complete = output.finish_reason == "stop"
        parts = self._write(self._blocks.finish(complete=is_complete))
        if not self._output:
            parts += self._write([BlockBegin("text"), BlockEnd(is_complete)])
        self._response["usage"] = usage_of(self._usage)
        if output.finish_reason == "abort":
            return parts + self.fail(ShuttingDownError())
        if is_complete:
            self._response |= {"status": "completed", "completed_at": int(time.time())}
            return parts + self._response_event("response.completed")
        self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return parts + self._response_event("response.incomplete")

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._response_event("response.failed")

    def cancel(self) -> None:
        """Mark the response as cancelled."""
        self._response["status"] = "cancelled"

    def answer(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._response

    def _write(self, events: Iterable[BlockEvent]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            match event:
                case BlockBegin(kind, name):
                    parts += self._begin_item(kind, name)
                case BlockText(text):
                    if self._output[-1]["type"] != "custom_tool_call":  # its text is known once the arguments are complete
                        parts.append(self._item_event("delta", delta=text, **self._delta_logprobs(text)))
                    self._text += text
                case BlockEnd(complete):
                    parts += self._end_item("completed" if complete else "incomplete")
        return b"".join(parts)

    def _begin_item(self, kind: str, name: str) -> list[bytes]:
        item: dict[str, Any]
        if kind == "call":
            item = self._new_call(name)
        elif kind == "text":
            item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        self._output.append(item)
        self._text, self._text_logprobs = "", []
        parts = [self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)]
        if item["type"] in _PARTS:
            parts.append(self._part_event("added"))
        return parts

    def _new_call(self, name: str) -> dict[str, Any]:
        """The item of a call, as the client declared the tool. name: under which the model sees the tool."""
        kind, text, prefix = ("custom_tool_call", "input", "ctc") if name in self._custom else ("function_call", "arguments", "fc")
        namespace, own_name = self._namespaces.get(name, (None, name))
        item = {"id": new_id(prefix), "type": kind, "status": "in_progress", "call_id": self._ids.new(name), "name": own_name, text: ""}
        return item if namespace is None else {**item, "namespace": namespace}

    def _end_item(self, status: str) -> list[bytes]:
        item, text = self._output[-1], self._text
        item["status"] = status
        parts = []
        if item["type"] == "function_call":
            item["arguments"] = text
            parts.append(self._item_event("done", arguments=text, name=item["name"]))
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(text)
            parts += [self._item_event("delta", delta=item["input"]), self._item_event("done", input=item["input"])]
        else:
            logprobs = {"logprobs": self._text_logprobs} if item["type"] == "message" else {}
            parts += [self._item_event("done", text=text, **logprobs), self._part_event("done")]
            item["content"].append(self._part())
        parts.append(self._event("response.output_item.done", output_index=len(self._output) - 1, item=item))
        return parts

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[self._output[-1]["type"]], "text": self._text}
        if part["type"] == "reasoning_text":
            return part
        return {**part, "annotations": [], "logprobs": self._text_logprobs}

    def _delta_logprobs(self, text: str) -> dict[str, Any]:
        """The field `logprobs` of an event with the open item's next text, which only messages have."""
        kind = self._output[-1]["type"]
        entries = []
        if self._logprobs is not None and kind != "function_call":  # a call's arguments may not be the generated text
            entries = self._logprobs.take(text, begins=not self._text)
        if kind != "message":
            return {}
        self._text_logprobs += entries
        return {"logprobs": entries}

    def _part_event(self, what: str) -> bytes:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return self._event(f"response.content_part.{what}", **place, part=self._part())

    def _item_event(self, what: str, /, **fields: Any) -> bytes:
        """An event about the text of the open item."""
        item = self._output[-1]
        place: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if item["type"] in _PARTS:
            place["content_index"] = 0
        return self._event(f"{_EVENTS[item['type']]}.{what}", **place, **fields)

    def _response_event(self, name: str) -> bytes:
        return self._event(name, response=self._response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return named_event(name, sequence_number=number, **fields)


def usage_of(usage: Usage) -> dict[str, Any]:
    """The Responses API's `usage`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.shown_cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprobs_of(conversation: Conversation) -> TextLogprobs | None:
    params, context = conversation.params, conversation.context
    if params.logprobs is None or context.inputs.tokenizer is None:
        return None
    as_ids = context.settings.return_tokens_as_token_ids
    return TextLogprobs(context.inputs.tokenizer, as_ids=as_ids, skips_special_tokens=params.skip_special_tokens)


def _head(conversation: Conversation, body: ResponsesRequest, *, is_stored: bool) -> dict[str, Any]:
    """A response before its output."""
    params = conversation.params
    text = {} if body.text is None else body.text.model_dump(exclude_none=True)
    reasoning = body.reasoning
    return {
        "id": conversation.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": conversation.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": is_stored,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }

"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.actions import ActionError
from compile_and_serve.runtime.parsers.events import ParsedMessage
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.beam_search import answer_with_beams, check_beam_search
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.conversation.chat_message import MessageDeltas, whole_message
from compile_and_serve.serve.conversation.conversation import Conversation
from compile_and_serve.serve.engine.generation import Generation
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.http.request_scope import public_id
from compile_and_serve.serve.http.responses import DONE, EventStream, json_response
from compile_and_serve.serve.protocol.chat import RESPONSE_EXAMPLE, ChatCompletionRequest
from compile_and_serve.serve.protocol.chunks import ChunkWriter
from compile_and_serve.serve.protocol.kv_transfer import transfer_fields
from compile_and_serve.serve.protocol.logprobs import LogprobsWriter
from compile_and_serve.serve.responses_api.translate import chat_of_input
from compile_and_serve.serve.routers.common import ERROR_RESPONSES, EVENTS, collect, usage_options

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    summary="Chat completion",
    responses={200: {"content": {"application/json": {"example": RESPONSE_EXAMPLE}, **EVENTS}}, **ERROR_RESPONSES},
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """Answer a conversation. With `stream`, server-sent events of chunks, then `[DONE]`."""
    if body.input is not None and not body.messages:
        body = await context.bodies.run(request, lambda: chat_of_input(body, context.media.take))
    else:
        messages, taken = context.media.take(body.messages, "messages")
        body = body.model_copy(update={"messages": messages}).with_media(taken) if taken is not None else body
    body = _with_action(body, context)
    check_beam_search(body)
    request_id = public_id("chatcmpl", body.request_id, request)
    answer = _Answer(body, await Conversation.create(body, request, context, request_id))
    if body.use_beam_search:
        if answer.conversation.media:
            raise ApiError(400, "Beam search reads no images: leave out use_beam_search.", "use_beam_search")
        one = answer.conversation
        return await answer_with_beams(body, request, context, [one.prompt], [one.params], answer.complete, **one.submit_options())
    if body.stream:
        generation = await answer.conversation.submit()
        return EventStream(answer.stream(generation), on_close=generation.close)
    return await collect(request, answer.conversation.submit, answer.complete, answer.write_prompt)


def _with_action(body: ChatCompletionRequest, context: ServerContext) -> ChatCompletionRequest:
    """The request with what an action needs, if it asks for one. Raises a 400."""
    if body.unnorm_key is None:
        return body
    actions = context.media.actions
    if actions is None:
        raise ApiError(400, "unnorm_key asks for a robot's action, but this model gives none: leave it out.", "unnorm_key")
    try:
        num_tokens = actions.num_tokens(body.unnorm_key)
    except ActionError as error:
        raise ApiError(400, str(error), "unnorm_key") from None
    if body.stream:
        raise ApiError(400, "An action comes with a whole answer: leave out stream, or unnorm_key.", "stream")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) not in (None, num_tokens):
            raise ApiError(400, f"An action has {num_tokens} tokens, got {name} = {getattr(body, name)}: leave it out.", name)
    temperature = 0.0 if body.temperature is None else body.temperature
    return body.model_copy(update={"max_tokens": num_tokens, "ignore_eos": True, "temperature": temperature})


class _Answer:
    """One chat completion in progress."""

    def __init__(self, body: ChatCompletionRequest, conversation: Conversation) -> None:
        context = conversation.context
        self.body = body
        self.conversation = conversation
        self.params = conversation.params
        self.usage = conversation.usage
        if body.include_ledger:
            self.usage.ask_ledger(context.engine.book)
        self.head = {
            "id": conversation.request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": conversation.model,
            "system_fingerprint": context.fingerprint,
        }
        as_ids = bool(body.return_tokens_as_token_ids) or context.settings.return_tokens_as_token_ids
        self.logprobs = LogprobsWriter(context.inputs.tokenizer, as_ids=as_ids)
        self.role = context.settings.response_role if not body.continue_final_message else body.messages[-1]["role"]
        self.echo = self._echo()
        self.written: msgspec.Raw | None = None  # the prompt's log-probabilities
        self.message_options: dict[str, Any] = {"with_reasoning": body.include_reasoning is not False}

    async def write_prompt(self, completions: list[CompletionOutput]) -> None:
        """Write the prompt's log-probabilities, which may take long. `complete` needs them."""
        if (entries := completions[0].prompt_logprobs) is not None:
            self.written = await self.logprobs.prompt_json(entries)

    def complete(self, completions: list[CompletionOutput]) -> Response:
        """The answer as one JSON object."""
        choices = []
        for completion in completions:
            self.usage.add(completion)
            fields, finish_reason = self._message(completion)
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": {"role": self.role, **fields},
                "logprobs": self.logprobs.chat(completion.logprobs or []) if self.body.logprobs else None,
                "finish_reason": finish_reason,
                "stop_reason": completion.stop_reason,
            }
            choice["token_ids"] = completion.token_ids if self.body.return_token_ids else None
            if self.body.unnorm_key is not None:
                choice["action"] = self._action(completion)
            choices.append(choice)
        answer = {**self.head, "service_tier": None, "choices": choices, "usage": self.usage.as_dict(), **self._prompt_ids()}
        answer["prompt_logprobs"] = self.written
        return json_response(answer | transfer_fields(completions))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as events: roles, then text as it is generated, then usage if requested."""
        include_usage, continuous = usage_options(self.body, always=self.conversation.context.settings.force_include_usage)
        in_chunks = True if continuous else (False if include_usage else None)
        writer = ChunkWriter(self.head, _delta_body, usage=self.usage, usage_in_chunks=in_chunks)
        role = b'"delta":{"role":%s,"content":""}' % msgspec.json.encode(self.role)
        extra = self._prompt_ids()
        yield b"".join(writer.raw_chunk(index, role, extra=extra) for index in range(self.params.n))
        if self.echo:
            yield b"".join(writer.chunk(index, self.echo) for index in range(self.params.n))
        choices = [_Choice(self, writer) for _ in range(self.params.n)]
        async for deltas in generation:
            events: list[bytes] = []
            for delta in deltas:
                if delta.error is not None:
                    yield b"".join(events) + generation.failure_event(delta) + DONE
                    return
                self.usage.add(delta)
                events += choices[delta.index].chunks(delta)
            if events:
                yield b"".join(events)
        if include_usage:
            yield writer.usage_chunk()
        yield DONE

    def _message(self, completion: CompletionOutput) -> tuple[dict[str, Any], str | None]:
        """The fields of a message, and its finish reason."""
        reader = self.conversation.reader()
        message = ParsedMessage().add(reader.feed(completion.text, completion.token_ids, completion.finish_reason or "stop"))
        message.content = self.echo + message.content
        return whole_message(message, completion.finish_reason, ids=self.conversation.call_ids(), **self.message_options)

    def _action(self, completion: CompletionOutput) -> list[float] | None:
        """The robot's action; None: the answer ended before it was whole."""
        actions, key = self.conversation.context.media.actions, self.body.unnorm_key
        assert actions is not None
        return actions.action(completion.token_ids, key) if len(completion.token_ids) == actions.num_tokens(key) else None

    def _echo(self) -> str:
        last = self.body.messages[-1]
        content = last.get("content")
        if not self.body.echo or last.get("role") != self.role or not isinstance(content, str):
            return ""
        return content

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.conversation.prompt if self.body.return_token_ids else None}


class _Choice:
    """The stream of one completion."""

    def __init__(self, answer: _Answer, writer: ChunkWriter) -> None:
        self._answer = answer
        self._writer = writer
        self._reader = answer.conversation.reader()
        self._message = MessageDeltas(ids=answer.conversation.call_ids(), **answer.message_options)

    def chunks(self, delta: CompletionDelta) -> list[bytes]:
        """The events for what a step adds."""
        answer = self._answer
        body = answer.body
        with_tokens = bool(delta.token_ids and (body.logprobs or body.return_token_ids))
        if not delta.text and delta.finish_reason is None and not with_tokens:
            return []
        tokens: dict[str, Any] = {
            "logprobs": answer.logprobs.chat(delta.logprobs) if body.logprobs and delta.logprobs else None,
            "token_ids": delta.token_ids if body.return_token_ids else None,
        }
        finish: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._reader.is_plain:
            return [self._writer.chunk(delta.index, delta.text, **tokens, **finish)]
        events = self._reader.feed(delta.text, delta.token_ids, delta.finish_reason)
        bodies = self._message.deltas(events)
        if delta.finish_reason is not None:
            finish["finish_reason"] = self._message.finish_reason(delta.finish_reason)
            bodies.append({})
        elif with_tokens and not bodies:
            bodies.append({})
        chunks = []
        for number, fields in enumerate(bodies):
            encoded = b'"delta":' + msgspec.json.encode(fields)
            is_last = number == len(bodies) - 1
            options = {**(tokens if number == 0 else {}), **(finish if is_last else {})}
            chunks.append(self._writer.raw_chunk(delta.index, encoded, **options))
        return chunks


def _delta_body(text: bytes) -> bytes:
    return b'"delta":{"content":' + text + b"}"

"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.chat_message import MessageDeltas, whole_message
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.engine import Generation
from compile_and_serve.serve.errors import ApiError, user_errors
from compile_and_serve.serve.json_body import JsonRoute
from compile_and_serve.serve.parsers.events import ParsedMessage
from compile_and_serve.serve.parsers.output import OutputParser
from compile_and_serve.serve.parsers.selection import Parsers
from compile_and_serve.serve.protocol.chat import RESPONSE_EXAMPLE, ChatCompletionRequest
from compile_and_serve.serve.protocol.chunks import ChunkWriter
from compile_and_serve.serve.protocol.fields import check_fields, sampling_params
from compile_and_serve.serve.protocol.logprobs import LogprobsWriter
from compile_and_serve.serve.responses import DONE, EventStream, json_response
from compile_and_serve.serve.routers.common import ERROR_RESPONSES, collect, failure_event, usage_options
from compile_and_serve.serve.tool_use import ToolUse

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    summary="Chat completion",
    responses={200: {"content": {"application/json": {"example": RESPONSE_EXAMPLE}}}, **ERROR_RESPONSES},
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """Answer a conversation. With `stream`, server-sent events of chunks, then `[DONE]`."""
    tools = await context.prepare(request, lambda: context.tool_use(body))
    await context.check_structure(body.structure() if tools.grammar is None else tools.grammar)
    answer = await context.prepare(request, lambda: _Answer.prepare(body, tools, request, context), renders=True)
    if body.stream:
        generation = await answer.submit()
        return EventStream(answer.stream(generation), on_close=generation.close)
    return await collect(request, answer.submit, answer.complete)


class _Answer:
    """One chat completion in progress."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        context: ServerContext,
        text: str,
        prompt: list[int],
        params: SamplingParams,
        tools: ToolUse,
        head: dict[str, Any],
        cache_salt: str | None,
        lora: LoRARequest | None,
    ) -> None:
        self.body = body
        self.context = context
        self.text = text
        self.prompt = prompt
        self.params = params
        self.tools = tools
        self.head = head
        self.cache_salt = cache_salt
        self.lora = lora
        self.usage = context.usage(len(prompt))
        if context.parsers.reasoning is not None:
            self.usage.reasoning_tokens = 0
        as_ids = bool(body.return_tokens_as_token_ids) or context.settings.return_tokens_as_token_ids
        self.logprobs = LogprobsWriter(context.tokenizer, as_ids=as_ids)
        self.role = context.settings.response_role if not body.continue_final_message else body.messages[-1]["role"]
        self.echo = self._echo()
        parser = context.parsers.tools if tools.parser is None else tools.parser
        self.message_options: dict[str, Any] = {
            "with_reasoning": body.include_reasoning is not False,
            "id_length": None if parser is None else parser.id_length,
        }

    @classmethod
    def prepare(cls, body: ChatCompletionRequest, tools: ToolUse, request: Request, context: ServerContext) -> _Answer:
        """Check the whole request before an answer begins. Raises `ApiError`."""
        model, lora = context.check_model(body.model)
        check_fields(body)
        context.check_priority(body.priority)
        names = body.names()
        params = sampling_params(
            body,
            context.settings.default_sampling,
            max_tokens=body.max_new_tokens(),
            logprobs=body.num_logprobs(),
            names=names,
        )
        text = context.render(body, tools)
        params = _with_parsers(params, text, tools, context.parsers, body.thinking_token_budget)
        if tools.grammar is not None:
            names = {**names, "structured_outputs": "tools"}
        ids = context.encode(text, params, add_special_tokens=bool(body.add_special_tokens), names=names)
        with user_errors(names):
            prompt, params = context.inputs.prepare(ids, params)
        head = {
            "id": context.request_id("chatcmpl", body.request_id, request),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }
        return cls(body, context, text, prompt, params, tools, head, context.cache_salt(body.cache_salt, request), lora)

    async def submit(self) -> Generation:
        """Send the request to the engine."""
        return await self.context.engine.submit(
            self.head["id"],
            [self.prompt],
            [self.params],
            priority=self.body.priority or 0,
            cache_salt=self.cache_salt,
            lora=self.lora,
        )

    def complete(self, completions: list[CompletionOutput]) -> Response:
        """The answer as one JSON object."""
        choices = []
        for completion in completions:
            self._count(completion.index, len(completion.token_ids), completion.num_cached_tokens)
            fields, finish_reason = self._message(completion)
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": {"role": self.role, **fields},
                "logprobs": self.logprobs.chat(completion.logprobs or []) if self.body.logprobs else None,
                "finish_reason": finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        answer = {**self.head, "choices": choices, "usage": self.usage.as_dict(), **self._prompt_ids()}
        prompt_logprobs = completions[0].prompt_logprobs
        answer["prompt_logprobs"] = None if prompt_logprobs is None else self.logprobs.prompt(prompt_logprobs)
        return json_response(answer)

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as events: roles, then text as it is generated, then usage if requested."""
        include_usage, continuous = usage_options(self.body)
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
                    yield b"".join(events) + failure_event(self.context, delta) + DONE
                    return
                self._count(delta.index, len(delta.token_ids), delta.num_cached_tokens)
                events += choices[delta.index].chunks(delta)
            if events:
                yield b"".join(events)
        if include_usage:
            yield writer.usage_chunk()
        yield DONE

    def parser(self) -> OutputParser | None:
        """A new parser for one completion."""
        max_calls = None if self.tools.parallel else 1
        return self.context.parsers.output_parser(self.text, self.tools.parser, self.tools.schemas, max_calls=max_calls)

    def _message(self, completion: CompletionOutput) -> tuple[dict[str, Any], str | None]:
        """The fields of a message, and its finish reason."""
        parser, message = self.parser(), ParsedMessage()
        if parser is None:
            message.content = completion.text
        else:
            message.add(parser.feed(completion.text, completion.token_ids, last=True))
            self.count_reasoning(parser.num_reasoning_tokens)
        message.content = self.echo + message.content
        return whole_message(message, completion.finish_reason, **self.message_options)

    def count_reasoning(self, num_tokens: int) -> None:
        """Add the reasoning tokens of a completion to the usage."""
        if self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens += num_tokens

    def _count(self, index: int, num_tokens: int, num_cached: int) -> None:
        self.usage.completion_tokens += num_tokens
        # All completions share the prompt, so its cached tokens are counted once, like its tokens.
        if num_cached and index == 0:
            self.usage.cached_tokens = num_cached

    def _echo(self) -> str:
        last = self.body.messages[-1]
        content = last.get("content")
        if not self.body.echo or last.get("role") != self.role or not isinstance(content, str):
            return ""
        return content

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt} if self.body.return_token_ids else {}


class _Choice:
    """The stream of one completion."""

    def __init__(self, answer: _Answer, writer: ChunkWriter) -> None:
        self._answer = answer
        self._writer = writer
        self._parser = answer.parser()
        self._message = MessageDeltas(**answer.message_options)

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
        parser = self._parser
        if parser is None:
            return [self._writer.chunk(delta.index, delta.text, **tokens, **finish)]
        counted = parser.num_reasoning_tokens
        events = parser.feed(delta.text, delta.token_ids, last=delta.finish_reason is not None)
        answer.count_reasoning(parser.num_reasoning_tokens - counted)
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


def _with_parsers(
    params: SamplingParams, text: str, tools: ToolUse, parsers: Parsers, budget: int | None
) -> SamplingParams:
    """The parameters with the grammar of the tools, which begins after the reasoning, and the tokens that parsers read.

    text: the prompt. budget: tokens of the reasoning.
    """
    changes: dict[str, Any] = {}
    structured = tools.grammar if tools.grammar is not None else params.structured_outputs
    reasoning = parsers.reasoning
    budget = None if budget == -1 else budget
    if budget is not None and (reasoning is None or not parsers.reasoning_ends()):
        sentence = "thinking_token_budget needs a reasoning parser: start the server with --reasoning-parser NAME."
        raise ApiError(400, sentence, "thinking_token_budget")
    if reasoning is not None and reasoning.begins_with_reasoning(text):
        if budget is not None and structured is None:
            structured = StructuredOutputsParams()
        if structured is not None:
            structured = msgspec.structs.replace(
                structured,
                begins_after=parsers.reasoning_ends(),
                thinking_token_budget=budget,
                thinking_starts=parsers.reasoning_start(text),
            )
    if structured is not None:
        changes["structured_outputs"] = structured
    if parsers.needs_special_tokens(tools.parser):
        changes["skip_special_tokens"] = False
    return msgspec.structs.replace(params, **changes) if changes else params


def _delta_body(text: bytes) -> bytes:
    return b'"delta":{"content":' + text + b"}"

"""`Conversation`: the road from a chat request to the engine and back to parser events, for all APIs with conversations.

A router translates its API's body to a `ChatCompletionRequest` and writes the events in its API's form.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request

from compile_and_serve.custom_ops.step_data import MediaItem
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.media.prepared import PreparedMedia
from compile_and_serve.runtime.parsers.events import CallBegin, CallDropped, Content, Event
from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.pooling.results import check_generates
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.runtime.text.special_text import ChatText
from compile_and_serve.runtime.tools.tool_use import ToolUse, parsed_params
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.conversation.chat_message import CallIds
from compile_and_serve.serve.conversation.event_reader import EventReader
from compile_and_serve.serve.engine.generation import Generation
from compile_and_serve.serve.errors import ApiError, to_api_error, user_errors
from compile_and_serve.serve.http.middleware import cache_salt
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.fields import check_fields
from compile_and_serve.serve.protocol.kv_transfer import transfer_params
from compile_and_serve.serve.protocol.usage import Usage


@dataclass(kw_only=True, slots=True)
class Conversation:
    """A checked request: the prompt and everything that its answer depends on.

    request_id: the public id. model: its name in the answer. text, prompt: the rendered conversation and its token ids. media: what
    stands in it beside text.
    usage: counts the answer's tokens. parser: of tool calls, in this conversation. num_calls: tool calls that the conversation has.
    """

    context: ServerContext
    request_id: str
    model: str
    text: str
    prompt: list[int]
    media: list[MediaItem]
    params: SamplingParams
    tools: ToolUse
    usage: Usage
    parser: type[ToolParser] | None
    num_calls: int
    priority: int
    cache_salt: str | None
    lora: LoRARequest | None
    kv_transfer: dict[str, Any] | None = None

    @classmethod
    async def create(cls, body: ChatCompletionRequest, request: Request, context: ServerContext, request_id: str) -> Conversation:
        """Check the whole request and render its prompt. Raises `ApiError`."""
        check_generates(context.inputs.info)
        tools = await context.bodies.run(request, lambda: context.prompts.tool_use(body))
        structure = body.structure(open_schemas=context.settings.open_schemas)
        await context.bodies.check_structure(structure if tools.grammar is None else tools.grammar)
        media = await context.media.prepare(body.taken_media, body.mm_processor_kwargs, "messages")
        return await context.bodies.run(request, lambda: cls._create(body, tools, request, context, request_id, media), renders=True)

    @classmethod
    def _create(
        cls,
        body: ChatCompletionRequest,
        tools: ToolUse,
        request: Request,
        context: ServerContext,
        request_id: str,
        media: Sequence[PreparedMedia],
    ) -> Conversation:
        settings, parsers = context.settings, context.parsers
        model, lora = context.adapters.check_model(body.model)
        check_fields(body, priority=body.priority, priorities=settings.priorities)
        params = body.params(settings.default_sampling, open_schemas=settings.open_schemas)
        names = body.names()
        if tools.grammar is not None:
            names = {**names, "structured_outputs": "tools"}
        with user_errors(names):
            rendered = context.prompts.render(body, tools)
            budget = _thinking_budget(body.thinking_token_budget, parsers)
            params = parsed_params(params, rendered.text, tools, parsers, thinking_token_budget=budget)
            given: ChatText | list[int] = rendered
            items: list[MediaItem] = []
            adds = bool(body.add_special_tokens)
            if context.media.processor is not None:
                given, items, params = context.inputs.place(rendered, media, context.media.processor, params, add_special_tokens=adds)
            prompt, params = context.inputs.prepare(given, params, add_special_tokens=adds)
        parser = tools.parser or parsers.tools
        return cls(
            context=context,
            request_id=request_id,
            model=model,
            text=rendered.text,
            prompt=prompt,
            media=items,
            params=params,
            tools=tools,
            usage=Usage(len(prompt), settings.prompt_tokens_details, n=params.n, reasoning_tokens=None if parsers.reasoning is None else 0),
            parser=parser,
            num_calls=sum(len(calls) for message in body.messages if isinstance(calls := message.get("tool_calls"), list)),
            priority=body.priority or 0,
            cache_salt=cache_salt(body.cache_salt, request, context.settings.api_keys),
            lora=lora,
            kv_transfer=transfer_params(body, context.inputs.info, num_sequences=params.n),
        )

    async def submit(self) -> Generation:
        """Send the request to the engine."""
        media = [self.media] if self.media else None
        return await self.context.engine.submit(prompts=[self.prompt], params=[self.params], media=media, **self.submit_options())

    def submit_options(self) -> dict[str, Any]:
        """Arguments of `AsyncEngine.submit` besides prompts and parameters."""
        options = {"request_id": self.request_id, "priority": self.priority, "cache_salt": self.cache_salt, "lora": self.lora}
        return options if self.kv_transfer is None else {**options, "kv_transfer": self.kv_transfer}

    def call_ids(self) -> CallIds:
        """The ids of the calls of one completion."""
        return CallIds(self.parser, self.num_calls)

    def reader(self) -> EventReader:
        """A reader of one completion."""
        return EventReader(self.context.parsers, self.text, self.tools, self.usage)


class EventWriter(Protocol):
    """Writes the events of one completion in the form of an API. `stream` sends the bytes; `whole` reads `answer`."""

    def begin(self) -> bytes: ...

    def write(self, events: Sequence[Event], output: CompletionDelta | CompletionOutput) -> bytes:
        """The next part of a stream. events: what the parsers found once they had read `output`."""
        ...

    def finish(self, output: CompletionDelta | CompletionOutput) -> bytes: ...

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that has begun."""
        ...

    def answer(self) -> dict[str, Any]:
        """The whole answer, after `finish`."""
        ...


async def stream(conversation: Conversation, generation: Generation, writer: EventWriter) -> AsyncIterator[bytes]:
    """The bytes of a streamed answer of one completion."""
    reader = conversation.reader()
    yield writer.begin()
    try:
        async for deltas in generation:
            parts: list[bytes] = []
            for delta in deltas:
                if delta.error is not None:
                    yield b"".join(parts) + writer.fail(generation.failure(delta))
                    return
                conversation.usage.add(delta)
                last = delta.finish_reason is not None
                parts.append(writer.write(reader.feed(delta.text, delta.token_ids, delta.finish_reason), delta))
                if last:
                    parts.append(writer.finish(delta))
            if written := b"".join(parts):
                yield written
    except Exception as error:
        yield writer.fail(to_api_error(error))


def whole(conversation: Conversation, completion: CompletionOutput, writer: EventWriter) -> dict[str, Any]:
    """The answer with one finished completion. Malformed calls are content."""
    writer.begin()
    conversation.usage.add(completion)
    events = conversation.reader().feed(completion.text, completion.token_ids, completion.finish_reason or "stop")
    writer.write(_without_dropped(events), completion)
    writer.finish(completion)
    return writer.answer()


def _without_dropped(events: Sequence[Event]) -> list[Event]:
    """The events of a whole text, where a malformed call is content from its beginning."""
    kept: list[Event] = []
    begin = 0
    for event in events:
        if isinstance(event, CallBegin):
            begin = len(kept)
        if isinstance(event, CallDropped):
            if event.begun:
                del kept[begin:]
            kept.append(Content(event.text))
        else:
            kept.append(event)
    return kept


def _thinking_budget(budget: int | None, parsers: Parsers) -> int | None:
    """The tokens that the reasoning may have; None: no limit. Raises a 400 if nothing can tell where it ends."""
    if budget is None or budget == -1:
        return None
    if parsers.reasoning is None or not parsers.reasoning_ends():
        sentence = "thinking_token_budget needs a reasoning parser: start the server with --reasoning-parser NAME."
        raise ApiError(400, sentence, "thinking_token_budget")
    return budget

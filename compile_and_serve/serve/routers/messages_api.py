"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.media.prepared import PreparedMedia
from compile_and_serve.runtime.text.output_processor import CompletionOutput
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.conversation.conversation import Conversation, stream, whole
from compile_and_serve.serve.errors import ShuttingDownError, user_errors
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.http.responses import EventStream, json_response
from compile_and_serve.serve.messages_api.translate import chat_request, own_names, prompt_request, wants_thinking
from compile_and_serve.serve.messages_api.writer import MessageWriter
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.messages_api import RESPONSE_EXAMPLE, CountTokensRequest, MessagesRequest, PromptFields
from compile_and_serve.serve.routers.common import ERROR_RESPONSES, EVENTS, collect
from compile_and_serve.serve.routers.tokens import check_length

router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)


@router.post(
    "/v1/messages",
    summary="Message (Anthropic)",
    responses={200: {"content": {"application/json": {"example": RESPONSE_EXAMPLE}, **EVENTS}}, **ERROR_RESPONSES},
)
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation in the form of Anthropic's API. With `stream`, its server-sent events."""
    with own_names():
        reasons = bool(context.parsers.reasoning_ends())
        chat = await context.bodies.run(request, lambda: _with_media(body, context, lambda body: chat_request(body, reasons=reasons)))
        conversation = await Conversation.create(chat, request, context, f"msg_{uuid.uuid4().hex[:24]}")
    writer = MessageWriter(conversation, with_thinking=wants_thinking(body))
    if body.stream:
        generation = await conversation.submit()
        return EventStream(stream(conversation, generation, writer), on_close=generation.close)

    def complete(completions: list[CompletionOutput]) -> Response:
        if completions[0].finish_reason == "abort":
            raise ShuttingDownError
        return json_response(whole(conversation, completions[0], writer))

    return await collect(request, conversation.submit, complete)


@router.post(
    "/v1/messages/count_tokens",
    summary="Tokens of a message request (Anthropic)",
    responses={200: {"content": {"application/json": {"example": {"input_tokens": 31}}}}, **ERROR_RESPONSES},
)
async def count_tokens(body: CountTokensRequest, request: Request, context: Context) -> Response:
    """The number of tokens of the prompt that `/v1/messages` would send to the model."""
    context.adapters.check_model(body.model)
    with own_names():
        chat = await context.bodies.run(request, lambda: _with_media(body, context, prompt_request))
        media = await context.media.prepare(chat.taken_media, None, "messages")
        return await context.bodies.run(request, lambda: _count_tokens(chat, media, context), renders=True)


_Body = TypeVar("_Body", bound=PromptFields)


def _with_media(body: _Body, context: ServerContext, translate: Callable[[_Body], ChatCompletionRequest]) -> ChatCompletionRequest:
    """The chat request of a body, whose media are taken out before."""
    messages, taken = context.media.take(body.messages, "messages")
    return translate(body.model_copy(update={"messages": messages})).with_media(taken)


def _count_tokens(chat: ChatCompletionRequest, media: Sequence[PreparedMedia], context: ServerContext) -> Response:
    with user_errors():
        tokenizer = context.inputs.require_tokenizer("count_tokens")
        text = context.prompts.render(chat, context.prompts.tool_use(chat, only_prompt=True))
    check_length(text.text, "messages")
    with user_errors():
        ids = tokenizer.encode(text, add_special_tokens=False)
    num_tokens = len(ids) + sum(len(one.tokens) - 1 for one in media)
    return json_response({"input_tokens": num_tokens})

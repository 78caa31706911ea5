"""OpenAI's Responses API: `/v1/responses`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from compile_and_serve.runtime.text.output_processor import CompletionOutput
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.conversation.conversation import Conversation, stream, whole
from compile_and_serve.serve.engine.generation import Generation
from compile_and_serve.serve.errors import MAX_ECHO, ApiError, to_api_error
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.http.middleware import is_admin, tenant_of
from compile_and_serve.serve.http.responses import EventStream, json_response
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.responses_api import RESPONSE_EXAMPLE, ResponsesRequest
from compile_and_serve.serve.response_store import ResponseStore, StoredResponse
from compile_and_serve.serve.responses_api.translate import (
    STORE_FLAG,
    Take,
    chat_request,
    check,
    input_items,
    new_id,
    own_names,
    referenced_ids,
)
from compile_and_serve.serve.responses_api.writer import ResponseWriter
from compile_and_serve.serve.routers.common import ERROR_RESPONSES, EVENTS, collect

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"example": RESPONSE_EXAMPLE}, **EVENTS}},
    **ERROR_RESPONSES,
}
_LOOKUPS: dict[int | str, dict[str, Any]] = {**ERROR_RESPONSES, 404: {"description": "No such stored response"}}


@router.post("/v1/responses", summary="Response", responses=_ANSWERS)
async def create_response(body: ResponsesRequest, request: Request, context: Context) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API. With `stream`, its server-sent events."""
    owner, store = tenant_of(request), context.stored_responses
    if body.background and store is not None:
        _check_background(store, owner, context)
    with own_names():
        # Not in a thread, because the store is not thread-safe.
        history = _history(body.previous_response_id, store, owner)
        references = referenced_ids(body.input)
        known = {} if store is None or not references else store.items(references, owner)
        chat, items = await context.bodies.run(
            request, lambda: _translate(body, history, known, context.media.take, stores=store is not None), is_large=bool(history or known)
        )
        conversation = await Conversation.create(chat, request, context, new_id("resp"))
    if body.store is False:
        store = None
    writer = ResponseWriter(conversation, body, is_stored=store is not None)

    def keep() -> None:
        if store is not None:
            store.put(conversation.request_id, owner, StoredResponse(writer.answer(), items))

    if body.background:
        assert store is not None  # `_translate` refuses other requests
        _check_background(store, owner, context)
        store.begin(owner)
        try:
            generation = await conversation.submit()
        except BaseException:
            store.end(owner)
            raise
        keep()
        task = asyncio.create_task(_run(conversation, generation, writer, keep))
        store.tasks[conversation.request_id] = task

        def end(_: asyncio.Task[None]) -> None:
            store.tasks.pop(conversation.request_id, None)
            store.end(owner)

        task.add_done_callback(end)
        return json_response(writer.answer())
    if body.stream:
        generation = await conversation.submit()
        return EventStream(_kept(stream(conversation, generation, writer), writer, keep), on_close=generation.close)

    def complete(completions: list[CompletionOutput]) -> Response:
        answer = whole(conversation, completions[0], writer)
        keep()
        return json_response(answer)

    return await collect(request, conversation.submit, complete)


@router.get("/v1/responses/{response_id}", summary="A stored response", responses=_LOOKUPS)
async def retrieve_response(
    response_id: str, request: Request, context: Context, stream: Annotated[bool | None, Query(description="Refused unless false.")] = None
) -> Response:
    """A response that was stored by a request with the same API key."""
    if stream:
        raise ApiError(400, "Stored responses cannot be streamed: set stream to false.", "stream")
    _, stored = _find(response_id, request, context)
    return json_response(stored.response)


@router.delete("/v1/responses/{response_id}", summary="Delete a stored response", responses=_LOOKUPS)
async def delete_response(response_id: str, request: Request, context: Context) -> Response:
    """Delete a stored response. One that is generated in the background is cancelled."""
    store, _ = _find(response_id, request, context)
    await _cancel(store, response_id)
    store.delete(response_id, tenant_of(request))
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", summary="Cancel a background response", responses=_LOOKUPS)
async def cancel_response(response_id: str, request: Request, context: Context) -> Response:
    """End a response that is generated in the background. One that has ended is returned as it is.

    The admin key ends those of all keys, and gets their status without their content.
    """
    store = context.stored_responses
    if is_admin(request) and store is not None and (owner := store.owner_of(response_id)) is not None and owner[0] != tenant_of(request):
        await _cancel(store, response_id)
        others = store.get(response_id, owner[0])
        status = "cancelled" if others is None else others.response["status"]
        return json_response({"id": response_id, "object": "response", "status": status})
    store, stored = _find(response_id, request, context)
    if not stored.response["background"]:
        raise ApiError(400, "Only responses with background=true can be cancelled.", "response_id")
    await _cancel(store, response_id)
    _, stored = _find(response_id, request, context)
    return json_response(stored.response)


@router.get("/v1/responses/{response_id}/input_items", summary="Input of a stored response", responses=_LOOKUPS)
async def list_input_items(
    response_id: str,
    request: Request,
    context: Context,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the newest first.")] = "desc",
    after: Annotated[str | None, Query(description="Begin after the item with this id.")] = None,
) -> Response:
    """The items that a stored response answers: its input, and the conversation that it continues."""
    _, stored = _find(response_id, request, context)
    items = stored.items if order == "asc" else stored.items[::-1]
    if after is not None:
        at = next((at for at, item in enumerate(items) if item.get("id") == after), None)
        if at is None:
            raise ApiError(400, f"after is {after!r:.{MAX_ECHO}}, which is not the id of an input item.", "after")
        items = items[at + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _check_background(store: ResponseStore, owner: str | None, context: ServerContext) -> None:
    """Raise a 429 if the API key has as many responses in the background as it may have."""
    if not store.may_begin(owner):
        limit = context.settings.max_background_responses
        message = f"{limit} responses of this API key are in progress in the background: wait for some, or cancel them."
        raise ApiError(429, message, "background", retry_after=context.engine.retry_after() or 1)


def _translate(
    body: ResponsesRequest, history: list[dict[str, Any]], known: Mapping[str, dict[str, Any]], take: Take, *, stores: bool
) -> tuple[ChatCompletionRequest, list[dict[str, Any]]]:
    """The chat request, and the items of the conversation. known: stored items that the input refers to, by id. take: see
    `MediaWork.take`. Raises a 400.

    stores: whether the server stores responses.
    """
    check(body)
    if body.background and not (stores and body.store is not False):
        raise ApiError(400, f"background needs a stored response: {STORE_FLAG}, and leave store out.", "background")
    items = [*history, *input_items(body.input, known, stores=stores)]
    readable, taken = take(items, "input")
    return chat_request(body, readable).with_media(taken), items


def _history(response_id: str | None, store: ResponseStore | None, owner: str | None) -> list[dict[str, Any]]:
    """The conversation that a request continues. Raises a 400, as OpenAI does."""
    if response_id is None:
        return []
    if store is None:
        raise ApiError(400, f"This server stores no responses: {STORE_FLAG}, or send the conversation in input.", "previous_response_id")
    stored = store.get(response_id, owner)
    if stored is None:
        raise ApiError(400, f"Previous response with id {response_id!r:.{MAX_ECHO}} not found.", "previous_response_id")
    if stored.response["status"] == "in_progress":
        raise ApiError(400, f"The response {response_id!r:.{MAX_ECHO}} is not finished.", "previous_response_id")
    return [*stored.items, *stored.response["output"]]


def _find(response_id: str, request: Request, context: ServerContext) -> tuple[ResponseStore, StoredResponse]:
    """The store and the response in it. Raises a 404, also for the response of another API key."""
    store = context.stored_responses
    stored = None if store is None else store.get(response_id, tenant_of(request))
    if store is None or stored is None:
        hint = f" This server stores none: {STORE_FLAG}." if store is None else ""
        raise ApiError(404, f"There is no stored response {response_id!r:.{MAX_ECHO}}.{hint}", "response_id")
    return store, stored


async def _cancel(store: ResponseStore, response_id: str) -> None:
    task = store.tasks.get(response_id)
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


async def _run(conversation: Conversation, generation: Generation, writer: ResponseWriter, keep: Callable[[], None]) -> None:
    """Generate a background response and store it."""
    try:
        completions = await generation.gather()
        whole(conversation, completions[0], writer)
    except asyncio.CancelledError:
        writer.cancel()
    except Exception as error:
        writer.fail(to_api_error(error))
    finally:
        generation.close()
        keep()


async def _kept(parts: AsyncIterator[bytes], writer: ResponseWriter, keep: Callable[[], None]) -> AsyncIterator[bytes]:
    """The parts of a stream. The response is stored before its last event is sent."""
    async for part in parts:
        if writer.answer()["status"] != "in_progress":
            keep()
        yield part

"""Code shared by the routes that generate text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from compile_and_serve.runtime.messages import ErrorKind
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.engine import Generation
from compile_and_serve.serve.errors import ApiError, error_body
from compile_and_serve.serve.protocol.fields import GenerationFields
from compile_and_serve.serve.responses import ClientGoneError, client_gone_response, event, until_disconnect

_STATUS: dict[ErrorKind, int] = {"invalid": 400, "overloaded": 503, "internal": 500}
_ERROR_EXAMPLE = error_body(400, "temperature must be in [0, 2], got 3.0.", "temperature")
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {
        "description": "The request is invalid",
        "content": {"application/json": {"example": _ERROR_EXAMPLE}},
    },
    401: {"description": "No valid API key"},
    404: {"description": "No such model"},
    503: {"description": "The queue is full or the engine is down (Retry-After says when to try again)"},
}


def usage_options(body: GenerationFields) -> tuple[bool, bool]:
    """(whether a usage chunk ends the stream, whether every chunk carries usage)."""
    options = body.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


def failure(context: ServerContext, delta: CompletionDelta) -> ApiError:
    """The answer to a request that the engine ended with an error."""
    status = 503 if context.engine.dead_reason is not None else _STATUS[delta.error_kind]
    return ApiError(status, delta.error or "")


def failure_event(context: ServerContext, delta: CompletionDelta) -> bytes:
    """The error event for a stream that has already begun."""
    failed = failure(context, delta)
    return event(error_body(failed.status, failed.message))


async def collect(
    request: Request,
    submit: Callable[[], Awaitable[Generation]],
    complete: Callable[[list[CompletionOutput]], Response],
) -> Response:
    """Wait for every completion and answer with all of them. A client's disconnect ends its generation."""
    context: ServerContext = request.app.state.context

    async def work() -> Response:
        generation = await submit()
        try:
            completions = [CompletionOutput(index) for index in range(generation.num_sequences)]
            async for deltas in generation:
                for delta in deltas:
                    completions[delta.index].add(delta)
                    if delta.error is not None:
                        raise failure(context, delta)
            return complete(completions)
        finally:
            generation.close()

    try:
        return await until_disconnect(request, work())
    except ClientGoneError:
        return client_gone_response()

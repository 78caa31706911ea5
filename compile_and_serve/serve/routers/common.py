"""Code shared by the routes that generate text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from compile_and_serve.runtime.text.output_processor import CompletionOutput
from compile_and_serve.serve.engine.generation import Generation
from compile_and_serve.serve.http.responses import client_gone_response, until_disconnect
from compile_and_serve.serve.protocol.fields import GenerationFields

# In the documentation of a route that streams.
EVENTS: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
# `openapi` adds the errors of every route with a body.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {401: {"description": "No valid API key"}, 404: {"description": "No such model"}}


def usage_options(body: GenerationFields, *, always: bool) -> tuple[bool, bool]:
    """(whether a usage chunk ends the stream, whether every chunk carries usage). always: the server ends all streams with one."""
    options = body.stream_options
    if options is None:
        return always, False
    included = always or bool(options.include_usage)
    return included, bool(included and options.continuous_usage_stats)


async def collect(
    request: Request,
    submit: Callable[[], Awaitable[Generation]],
    complete: Callable[[list[CompletionOutput]], Response],
    write_ahead: Callable[[list[CompletionOutput]], Awaitable[None]] | None = None,
) -> Response:
    """Wait for every completion and answer with all of them. A client's disconnect ends its generation. write_ahead: what of the answer
    may take long: it lets the event loop run other work.
    """

    async def work() -> Response:
        generation = await submit()
        try:
            completions = await generation.gather()
            if write_ahead is not None:
                await write_ahead(completions)
            return complete(completions)
        finally:
            generation.close()

    return await until_disconnect(request.receive, work()) or client_gone_response()

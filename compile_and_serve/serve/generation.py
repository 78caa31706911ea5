"""The end of a generation: its completions, or the answer to a request that the engine ended with an error."""

from __future__ import annotations

from compile_and_serve.runtime.messages import ErrorKind
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.engine import Generation
from compile_and_serve.serve.errors import ApiError, error_body
from compile_and_serve.serve.responses import event

_STATUS: dict[ErrorKind, int] = {"invalid": 400, "overloaded": 503, "internal": 500, "deadline": 504}


def failure(context: ServerContext, delta: CompletionDelta) -> ApiError:
    """The answer to a request that the engine ended with an error."""
    status = 503 if context.engine.dead_reason is not None else _STATUS[delta.error_kind]
    retry_after = context.engine.retry_after() if delta.error_kind == "overloaded" else None
    return ApiError(status, delta.error or "", retry_after=retry_after)


def failure_event(context: ServerContext, delta: CompletionDelta) -> bytes:
    """The error event for a stream that has already begun."""
    failed = failure(context, delta)
    return event(error_body(failed.status, failed.message))


async def gather(context: ServerContext, generation: Generation) -> list[CompletionOutput]:
    """Every completion of a generation, once all are finished. Raises the failure of the first that failed."""
    completions = [CompletionOutput(index) for index in range(generation.num_sequences)]
    async for deltas in generation:
        for delta in deltas:
            completions[delta.index].add(delta)
            if delta.error is not None:
                raise failure(context, delta)
    return completions

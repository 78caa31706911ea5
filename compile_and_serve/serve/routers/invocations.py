"""`POST /invocations`, as SageMaker calls a model: the body decides which API answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, ValidationError

from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.completions import EXAMPLE as COMPLETION_EXAMPLE
from compile_and_serve.serve.protocol.completions import CompletionRequest
from compile_and_serve.serve.protocol.fields import RequestModel
from compile_and_serve.serve.protocol.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from compile_and_serve.serve.routers import chat, completions, pooling
from compile_and_serve.serve.routers.common import ERROR_RESPONSES

router = APIRouter(tags=["Utility"], route_class=JsonRoute)

Handler = Callable[[Any, Request, ServerContext], Awaitable[Response]]
# (fields that tell an API, its body, its handler); the first whose fields are all there answers.
_APIS: tuple[tuple[tuple[str, ...], type[RequestModel], Handler], ...] = (
    (("messages",), ChatCompletionRequest, chat.create_chat_completion),
    (("prompt",), CompletionRequest, completions.create_completion),
    (("query", "documents"), RerankRequest, pooling.rerank),
    (("query", "texts"), RerankRequest, pooling.rerank),
    (("text_1", "text_2"), ScoreRequest, pooling.score),
    (("queries", "documents"), ScoreRequest, pooling.score),
    (("input", "task"), PoolingRequest, pooling.create_pooling),
)


class InvocationRequest(RequestModel):
    """The body of any of the APIs."""

    model_config = ConfigDict(json_schema_extra={"examples": [COMPLETION_EXAMPLE]})

    @classmethod
    def known_fields(cls) -> set[str]:
        return super().known_fields().union(*(body.known_fields() for _, body, _ in _APIS))


@router.post("/invocations", summary="Any request of the model", responses=ERROR_RESPONSES)
async def invoke(body: InvocationRequest, request: Request, context: Context) -> Response:
    """Answers a chat, completion, embedding, class, score or rerank request, by the fields of the body."""
    given = {"model": body.model, **(body.model_extra or {})}
    for names, model, handler in (*_APIS, *_for_input(context)):
        if all(given.get(name) is not None for name in names):
            try:
                parsed = model.model_validate(given)
            except ValidationError as error:
                raise RequestValidationError(error.errors()) from error
            return await handler(parsed, request, context)
    raise ApiError(400, "The body must have one of: messages; prompt; input; query and documents; text_1 and text_2.")


def _for_input(context: ServerContext) -> tuple[tuple[tuple[str, ...], type[RequestModel], Handler], ...]:
    """What answers a body with `input` or `texts` depends on the model."""
    info = context.inputs.info.pooling
    if info is not None and info.kind == "classify":
        return tuple(((name,), ClassifyRequest, pooling.classify) for name in ("input", "texts"))
    return tuple(((name,), EmbeddingRequest, pooling.create_embedding) for name in ("input", "texts"))

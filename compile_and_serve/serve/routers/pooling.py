"""`POST /v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.llm.pooling import pairs_of
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.pooling.results import (
    TOKEN_TASKS,
    PreparedPrompt,
    Prompts,
    UnsupportedTaskError,
    check_task,
    prepare,
    rows_of,
    similarity,
    with_roles,
    with_rows,
)
from compile_and_serve.runtime.pooling_params import PoolingParams, PoolingTask
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.errors import ApiError, ShuttingDownError, user_errors
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.http.middleware import cache_salt
from compile_and_serve.serve.http.request_scope import public_id
from compile_and_serve.serve.http.responses import client_gone_response, json_response, until_disconnect
from compile_and_serve.serve.protocol.completions import MAX_PROMPT_TOKENS
from compile_and_serve.serve.protocol.fields import check_fields
from compile_and_serve.serve.protocol.pooling import (
    MAX_INPUTS,
    ClassifyRequest,
    EmbeddingRequest,
    InputFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    SparseRequest,
)
from compile_and_serve.serve.routers.common import ERROR_RESPONSES

router = APIRouter(tags=["Pooling"], route_class=JsonRoute)
_TEXTS_AT_ONCE = 64  # that are tokenized between two checks of their number of tokens
MAX_TOKEN_NUMBERS = 1 << 22  # numbers of the task token_embed in one answer
RESPONSES: dict[int | str, dict[str, Any]] = {**ERROR_RESPONSES, 501: {"description": "The model cannot do this task"}}

Write = Callable[[int, np.ndarray], Any]  # (index of the prompt, float32 [N, D]) → what the answer needs of it


@router.post("/v1/embeddings", summary="Embeddings", responses=RESPONSES)
async def create_embedding(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """A vector for each input, of length 1 unless `normalize` is false."""
    return await _answer_inputs(body, request, context, "embed", "embd", _embedding_writer(body, "embed", "embedding", "embedding"))


@router.post("/embed_sparse", summary="Sparse embeddings", responses=RESPONSES)
async def embed_sparse(body: SparseRequest, request: Request, context: Context) -> Response:
    """The weights of tokens of the vocabulary for each input, as Text Embeddings Inference answers; of masked LMs (SPLADE)."""
    info = check_task("embed", context.inputs.info)
    if info.is_normalized:
        raise UnsupportedTaskError("This model has no sparse embeddings: it is no masked LM.")

    def write(index: int, rows_ND: np.ndarray) -> msgspec.Raw:
        row_D = rows_ND[0]
        used = np.flatnonzero(row_D)
        return _raw([{"index": i, "value": value} for i, value in zip(used.tolist(), row_D[used].tolist(), strict=True)])

    def complete(found: list[Any], head: Mapping[str, Any], num_tokens: int) -> Response:
        return json_response(found)

    return await _run(body, request, context, lambda: [(one, None) for one in body.inputs()], body.params(), "sparse", write, complete)


@router.post("/pooling", summary="Pooled hidden states", responses=RESPONSES)
async def create_pooling(body: PoolingRequest, request: Request, context: Context) -> Response:
    """Whatever the model pools of each input; `task` token_embed and token_classify give a vector for each token."""
    info = context.inputs.info.pooling
    task = body.task or ("embed" if info is None else info.tasks[0])
    return await _answer_inputs(body, request, context, task, "pool", _embedding_writer(body, task, "pooling", "data"))


@router.post("/classify", summary="Classes", responses=RESPONSES)
async def classify(body: ClassifyRequest, request: Request, context: Context) -> Response:
    """The scores of the model's classes for each input."""

    def write(index: int, rows_ND: np.ndarray) -> msgspec.Raw:
        probs = rows_ND[0].tolist()
        best = int(np.argmax(rows_ND[0]))
        labels = check_task("classify", context.inputs.info).labels
        label = labels[best] if labels else str(best)
        return _raw({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})

    return await _answer_inputs(body, request, context, "classify", "classify", write)


@router.post("/score", summary="Similarity of texts", responses=RESPONSES)
@router.post("/v1/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """A score for each pair of texts: the cosine of their embeddings, late interaction, or the score of a classifier of pairs."""
    first, second = body.texts()
    with user_errors():
        pairs = pairs_of(first, second)

    def answer(scores: list[float], head: Mapping[str, Any], num_tokens: int) -> Response:
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return json_response({**head, "object": "list", "data": data, "usage": _usage(num_tokens)})

    return await _answer_pairs(body, request, context, pairs, "score", answer)


@router.post("/rerank", summary="Documents by relevance", responses=RESPONSES)
@router.post("/v1/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """The documents in the order of their relevance to the query. For `texts`, as Text Embeddings Inference answers."""
    texts = body.documents_texts()

    def answer(scores: list[float], head: Mapping[str, Any], num_tokens: int) -> Response:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        if body.texts is not None:
            return json_response(
                [{"index": index, "score": scores[index], **({"text": texts[index]} if body.return_text else {})} for index in order]
            )
        results: list[dict[str, Any]] = []
        for index in order:
            document = {"document": {"text": texts[index]}} if body.return_documents is not False else {}
            results.append({"index": index, **document, "relevance_score": scores[index]})
        return json_response({**head, "results": results, "usage": _usage(num_tokens)})

    return await _answer_pairs(body, request, context, [(body.query, text) for text in texts], "rerank", answer)


async def _answer_inputs(
    body: InputFields, request: Request, context: ServerContext, task: PoolingTask, prefix: str, write: Write
) -> Response:
    check_task(task, context.inputs.info)
    params = with_rows(body.params(), task)

    def complete(found: list[Any], head: Mapping[str, Any], num_tokens: int) -> Response:
        return json_response({**head, "object": "list", "data": found, "usage": _usage(num_tokens)})

    def prompts() -> Prompts:
        return [(one, None) for one in body.inputs()]

    return await _run(body, request, context, prompts, params, prefix, write, complete)


async def _answer_pairs(
    body: PoolingFields,
    request: Request,
    context: ServerContext,
    pairs: list[tuple[str, str]],
    prefix: str,
    answer: Callable[[list[float], Mapping[str, Any], int], Response],
) -> Response:
    info = check_task("score", context.inputs.info)
    if len(pairs) > MAX_INPUTS:
        raise ApiError(400, f"The request has {len(pairs)} pairs, but may have {MAX_INPUTS}.", None)
    params = body.params()
    if info.kind == "classify":
        return await _run(body, request, context, lambda: pairs, params, prefix, lambda _, rows_ND: float(rows_ND[0, 0]), answer)
    pairs = with_roles(pairs, info)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))

    def complete(rows: list[np.ndarray], head: Mapping[str, Any], num_tokens: int) -> Response:
        by_text = dict(zip(texts, rows, strict=True))
        return answer([similarity(by_text[first], by_text[second], info) for first, second in pairs], head, num_tokens)

    prompts = [(text, None) for text in texts]
    return await _run(body, request, context, lambda: prompts, params, prefix, lambda _, rows_ND: rows_ND, complete)


async def _run(
    body: PoolingFields,
    request: Request,
    context: ServerContext,
    prompts: Callable[[], Prompts],
    params: PoolingParams,
    prefix: str,
    write: Write,
    complete: Callable[[list[Any], Mapping[str, Any], int], Response],
) -> Response:
    """Check the request, pool its prompts, and answer. A client's disconnect ends its requests.

    Each result is written as it arrives: writing all at the end would hold up the event loop.
    """
    prepared, head, lora = await context.bodies.run(request, lambda: _prepare(body, request, context, prompts(), params, prefix))
    info = context.inputs.info.pooling
    assert info is not None

    async def work() -> Response:
        generation = await context.engine.submit(
            head["id"],
            [one.token_ids for one in prepared],
            [one.sampling for one in prepared],
            priority=body.priority or 0,
            cache_salt=cache_salt(body.cache_salt, request, context.settings.api_keys),
            lora=lora,
            pooling=params,
            step_data=[one.step_data for one in prepared],
        )
        found: list[Any] = [None] * len(prepared)
        try:
            async for deltas in generation:
                for delta in deltas:
                    if delta.error is not None:
                        raise generation.failure(delta)
                    if delta.finish_reason == "abort":
                        raise ShuttingDownError
                    if delta.pooled is not None:
                        found[delta.index] = write(delta.index, rows_of(delta.pooled, params, info))
            return complete(found, head, sum(len(one.token_ids) for one in prepared))
        finally:
            generation.close()

    return await until_disconnect(request.receive, work()) or client_gone_response()


def _prepare(
    body: PoolingFields, request: Request, context: ServerContext, prompts: Prompts, params: PoolingParams, prefix: str
) -> tuple[list[PreparedPrompt], dict[str, Any], LoRARequest | None]:
    model, lora = context.adapters.check_model(body.model)
    check_fields(body, priority=body.priority, priorities=context.settings.priorities)
    prepared: list[PreparedPrompt] = []
    num_tokens = 0
    for first in range(0, len(prompts), _TEXTS_AT_ONCE):
        with user_errors({"prompt": "input"} if isinstance(body, InputFields) else None):
            some = prepare(
                context.inputs, prompts[first : first + _TEXTS_AT_ONCE], params, add_special_tokens=body.add_special_tokens is not False
            )
        prepared += some
        num_tokens += sum(len(one.token_ids) for one in some)
        if num_tokens > MAX_PROMPT_TOKENS:
            raise ApiError(413, f"The inputs have more than {MAX_PROMPT_TOKENS} tokens together: send fewer per request.")
    info = context.inputs.info.pooling
    if params.pooling == "all" and info is not None and num_tokens * info.width > MAX_TOKEN_NUMBERS:
        limit = MAX_TOKEN_NUMBERS // info.width
        raise ApiError(413, f"The task token_embed takes {limit} tokens per request, got {num_tokens}: send fewer.", "input")
    head = {"id": public_id(prefix, body.request_id, request), "created": int(time.time()), "model": model}
    return prepared, head, lora


def _embedding_writer(body: EmbeddingRequest, task: PoolingTask, kind: str, field: str) -> Write:
    def write(index: int, rows_ND: np.ndarray) -> msgspec.Raw:
        values = rows_ND if isinstance(body, PoolingRequest) and task in TOKEN_TASKS else rows_ND[0]
        encoded: Any = values.tolist()
        if body.encoding_format == "base64":
            little_endian = values if sys.byteorder == "little" else values.byteswap()
            encoded = base64.b64encode(np.ascontiguousarray(little_endian).tobytes()).decode()
        return _raw({"index": index, "object": kind, field: encoded})

    return write


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}

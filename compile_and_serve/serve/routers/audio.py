"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.audio.options import TranscriptionError, TranscriptionOptions
from compile_and_serve.runtime.audio.transcriber import Decode, Decoded
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.errors import ApiError, error_body, to_api_error
from compile_and_serve.serve.http.middleware import cache_salt
from compile_and_serve.serve.http.request_scope import public_id
from compile_and_serve.serve.http.responses import EventStream, client_gone_response, event, until_disconnect
from compile_and_serve.serve.protocol.audio import TranscriptionRequest, TranslationRequest, form_schema
from compile_and_serve.serve.protocol.fields import check_fields
from compile_and_serve.serve.routers.common import ERROR_RESPONSES, EVENTS
from compile_and_serve.serve.transcription.answer import TextEvents, answer
from compile_and_serve.serve.transcription.form import read_form
from compile_and_serve.serve.transcription.work import HeldJob

router = APIRouter(tags=["Audio"])
PREFIX = "/v1/audio/"
_EXAMPLE = {"text": "The quick brown fox.", "usage": {"type": "duration", "seconds": 3}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"example": _EXAMPLE}, "text/plain": {"schema": {"type": "string"}}, **EVENTS}},
    400: {"description": "The request is invalid"},
    415: {"description": "The body is not a multipart form"},
    **ERROR_RESPONSES,
}


@router.post("/v1/audio/transcriptions", summary="Text of audio", responses=RESPONSES, openapi_extra=form_schema(TranscriptionRequest))
async def transcribe(request: Request, context: Context) -> Response:
    """The text of an audio file, in its language. With `stream`, events as the text becomes final."""
    context.transcriptions.require()
    body, data = await read_form(request, TranscriptionRequest, context.settings.allowed_origins)
    granularities = list(body.timestamp_granularities or ())
    options = _options(body, task="transcribe", language=body.language, words="word" in granularities)
    return await _answer(body, data, options, granularities, request, context)


@router.post(
    "/v1/audio/translations", summary="Audio into English text", responses=RESPONSES, openapi_extra=form_schema(TranslationRequest)
)
async def translate(request: Request, context: Context) -> Response:
    """The text of an audio file, in English."""
    context.transcriptions.require()
    body, data = await read_form(request, TranslationRequest, context.settings.allowed_origins)
    return await _answer(body, data, _options(body, task="translate"), (), request, context)


def _options(body: TranslationRequest, **options: Any) -> TranscriptionOptions:
    body.check()
    check_fields(body)
    form = body.response_format
    return TranscriptionOptions(
        prompt=body.prompt,
        temperature=body.temperature or 0.0,
        seed=body.seed,
        timestamps=form in ("srt", "vtt", "verbose_json"),
        wants_no_speech=form == "verbose_json",
        **options,
    )


async def _answer(
    body: TranslationRequest, data: bytes, options: TranscriptionOptions, granularities: Any, request: Request, context: ServerContext
) -> Response:
    _, lora = context.adapters.check_model(body.model)
    context.engine.check_accepts(())
    decoding = _Decoding(public_id("trsc", body.request_id, request), request, context, lora)
    if not body.stream:

        async def work() -> Response:
            held = await context.transcriptions.begin(data, options)
            try:
                async for _ in held.job.segments(decoding.decode):
                    pass
            except TranscriptionError as error:
                raise ApiError(400, str(error)) from None
            finally:
                held.release()
            assert held.job.result is not None
            return answer(held.job.result, body.response_format, granularities)

        return await until_disconnect(request.receive, work()) or client_gone_response()
    held = await until_disconnect(request.receive, context.transcriptions.begin(data, options))
    if held is None:
        return client_gone_response()

    def close() -> None:
        decoding.close()
        held.release()

    return EventStream(_events(held, decoding), on_close=close)


async def _events(held: HeldJob, decoding: _Decoding) -> AsyncIterator[bytes]:
    events = TextEvents()
    try:
        async for segment in held.job.segments(decoding.decode):
            if delta := events.delta(segment):
                yield delta
        assert held.job.result is not None
        yield events.done(held.job.result)
    except Exception as error:  # the answer has begun, so that its status cannot change any more
        failed = ApiError(400, str(error)) if isinstance(error, TranscriptionError) else to_api_error(error)
        yield event(error_body(failed.status, failed.message, failed.param))


class _Decoding:
    """Sends a transcription's pieces to the engine."""

    def __init__(self, request_id: str, request: Request, context: ServerContext, lora: LoRARequest | None) -> None:
        self._id, self._context, self._lora = request_id, context, lora
        self._salt = cache_salt(None, request, context.settings.api_keys)
        self._numbers = itertools.count()
        self._running: set[Any] = set()

    async def decode(self, one: Decode) -> Decoded:
        """The tokens of one piece."""
        generation = await self._context.engine.submit(
            f"{self._id}-{next(self._numbers)}",
            [one.prompt_token_ids],
            [one.params],
            cache_salt=self._salt,
            lora=self._lora,
            media=[one.media],
        )
        self._running.add(generation)
        try:
            (completion,) = await generation.gather()
        finally:
            self._running.discard(generation)
            generation.close()
        return Decoded.of(completion)

    def close(self) -> None:
        """Abort what still runs."""
        for generation in list(self._running):
            generation.close()

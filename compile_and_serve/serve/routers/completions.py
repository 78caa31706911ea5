"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.pooling.results import check_generates
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.beam_search import answer_with_beams, check_beam_search
from compile_and_serve.serve.context import Context, ServerContext
from compile_and_serve.serve.engine.generation import Generation
from compile_and_serve.serve.errors import ApiError, user_errors
from compile_and_serve.serve.http.json_body import JsonRoute
from compile_and_serve.serve.http.middleware import cache_salt
from compile_and_serve.serve.http.request_scope import public_id
from compile_and_serve.serve.http.responses import DONE, EventStream, json_response
from compile_and_serve.serve.protocol.chunks import ChunkWriter
from compile_and_serve.serve.protocol.completions import MAX_PROMPT_TOKENS, MAX_SEQUENCES, RESPONSE_EXAMPLE, CompletionRequest
from compile_and_serve.serve.protocol.fields import check_fields, sampling_params
from compile_and_serve.serve.protocol.kv_transfer import transfer_fields, transfer_params
from compile_and_serve.serve.protocol.logprobs import LogprobsWriter
from compile_and_serve.serve.protocol.usage import Usage
from compile_and_serve.serve.routers.common import ERROR_RESPONSES, EVENTS, collect, usage_options

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)


@router.post(
    "/v1/completions",
    summary="Completion",
    responses={200: {"content": {"application/json": {"example": RESPONSE_EXAMPLE}, **EVENTS}}, **ERROR_RESPONSES},
)
async def create_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """Continue one or more prompts. With `stream`, server-sent events of chunks, then `[DONE]`."""
    check_generates(context.inputs.info)
    await context.bodies.check_structure(body.structure(open_schemas=context.settings.open_schemas))
    answer = await context.bodies.run(request, lambda: _Answer.prepare(body, request, context))
    if body.include_ledger:
        answer.usage.ask_ledger(context.engine.book)
    if body.use_beam_search:
        return await answer_with_beams(body, request, context, answer.prompts, answer.params, answer.complete, **answer.submit_options())
    if body.stream:
        generation = await answer.submit()
        return EventStream(answer.stream(generation), on_close=generation.close)
    return await collect(request, answer.submit, answer.complete, answer.write_prompts)


class _Answer:
    """One completion request in progress. Completion i of prompt p has the index p * n + i."""

    def __init__(
        self,
        body: CompletionRequest,
        context: ServerContext,
        prompts: list[list[int]],
        params: list[SamplingParams],
        head: dict[str, Any],
        cache_salt: str | None,
        lora: LoRARequest | None,
    ) -> None:
        self.body = body
        self.context = context
        self.prompts = prompts
        self.params = params
        self.head = head
        self.cache_salt = cache_salt
        self.lora = lora
        self.kv_transfer = transfer_params(body, context.inputs.info, num_sequences=sum(one.n for one in params))
        self.usage = Usage(sum(map(len, prompts)), context.settings.prompt_tokens_details, n=params[0].n)
        as_ids = bool(body.return_tokens_as_token_ids) or context.settings.return_tokens_as_token_ids
        self.logprobs = LogprobsWriter(context.inputs.tokenizer, as_ids=as_ids)
        self.n = params[0].n
        self.echoed = [self._text_of(prompt) for prompt in prompts] if body.echo else []
        # For each completion, the `text_offset` of its next token.
        self.offsets = [0] * (len(prompts) * self.n)
        # Of completions with log-probabilities of their prompts, these as they are shown: as JSON, and as part of `logprobs`.
        self.written: dict[int, msgspec.Raw] = {}
        self.written_echo: dict[int, dict[str, Any]] = {}

    @classmethod
    def prepare(cls, body: CompletionRequest, request: Request, context: ServerContext) -> _Answer:
        """Check the whole request before an answer begins. Raises `ApiError`."""
        model, lora = context.adapters.check_model(body.model)
        check_fields(body, priority=body.priority, priorities=context.settings.priorities)
        check_beam_search(body)
        settings = context.settings
        requested = sampling_params(
            body, settings.default_sampling, max_tokens=body.max_tokens, logprobs=body.logprobs, open_schemas=settings.open_schemas
        )
        if body.echo:
            with user_errors():
                context.inputs.require_tokenizer("echo")
            if body.logprobs is not None:
                requested = msgspec.structs.replace(requested, prompt_logprobs=body.logprobs)
        given = body.prompts()
        if len(given) * requested.n > MAX_SEQUENCES:
            sentence = f"{len(given)} prompts with n={requested.n} make more than {MAX_SEQUENCES} completions: send fewer per request."
            raise ApiError(400, sentence, "prompt")
        prompts, params, num_tokens = [], [], 0
        for ids in given:
            with user_errors(body.names()):
                prompt, prompt_params = context.inputs.prepare(ids, requested, add_special_tokens=body.add_special_tokens is not False)
            prompts.append(prompt)
            params.append(prompt_params)
            num_tokens += len(prompt)
            if num_tokens > MAX_PROMPT_TOKENS:
                sentence = f"The prompts have more than {MAX_PROMPT_TOKENS} tokens together: send fewer per request."
                raise ApiError(413, sentence, "prompt")
        head = {
            "id": public_id("cmpl", body.request_id, request),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }
        return cls(body, context, prompts, params, head, cache_salt(body.cache_salt, request, context.settings.api_keys), lora)

    async def submit(self) -> Generation:
        """Send all prompts to the engine."""
        return await self.context.engine.submit(prompts=self.prompts, params=self.params, **self.submit_options())

    def submit_options(self) -> dict[str, Any]:
        """Arguments of `AsyncEngine.submit` besides prompts and parameters."""
        options = {"request_id": self.head["id"], "priority": self.body.priority or 0, "cache_salt": self.cache_salt, "lora": self.lora}
        return options if self.kv_transfer is None else {**options, "kv_transfer": self.kv_transfer}

    async def write_prompts(self, completions: list[CompletionOutput]) -> None:
        """Write the prompts' log-probabilities, which may take long. `complete` needs them."""
        for completion in completions:
            index, entries = completion.index, completion.prompt_logprobs
            if entries is None:
                continue
            if self.body.prompt_logprobs is not None:
                self.written[index] = await self.logprobs.prompt_json(entries)
            if self.body.echo and self.body.logprobs is not None:
                prompt = self.prompts[index // self.n][: len(entries)]
                shown = self.written_echo[index] = await self.logprobs.echoed(prompt, entries)
                self.offsets[index] = shown["text_offset"][-1] + self.logprobs.num_chars(prompt[-1])

    def complete(self, completions: list[CompletionOutput]) -> Response:
        """The answer as one JSON object."""
        choices = []
        for completion in completions:
            self.usage.add(completion)
            prompt = self.prompts[completion.index // self.n]
            logprobs = self._choice_logprobs(completion.index, completion.token_ids, completion.logprobs, [])
            if logprobs is not None and (echoed := self.written_echo.get(completion.index)) is not None:
                logprobs = {name: [*echoed[name], *values] for name, values in logprobs.items()}
            choice: dict[str, Any] = {
                "index": completion.index,
                "text": self._echo(completion.index) + completion.text,
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "prompt_logprobs": self.written.get(completion.index),
            }
            with_ids = self.body.return_token_ids
            choice |= {"prompt_token_ids": prompt if with_ids else None, "token_ids": completion.token_ids if with_ids else None}
            choices.append(choice)
        answer = {**self.head, "service_tier": None, "choices": choices, "usage": self.usage.as_dict()}
        return json_response(answer | transfer_fields(completions))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        """The answer as events: text as it is generated, then usage if requested."""
        include_usage, continuous = usage_options(self.body, always=self.context.settings.force_include_usage)
        in_chunks = True if continuous else (False if include_usage else None)
        writer = ChunkWriter(self.head, _text_body, usage=self.usage, usage_in_chunks=in_chunks)
        begun: set[int] = set()
        async for deltas in generation:
            events: list[bytes] = []
            for delta in deltas:
                if delta.error is not None:
                    yield b"".join(events) + generation.failure_event(delta) + DONE
                    return
                events += self._events(writer, delta, first=delta.index not in begun)
                begun.add(delta.index)
            if events:
                yield b"".join(events)
        if include_usage:
            yield writer.usage_chunk()
        yield DONE

    def _events(self, writer: ChunkWriter, delta: CompletionDelta, *, first: bool) -> list[bytes]:
        body = self.body
        self.usage.add(delta)
        text = self._echo(delta.index) + delta.text if first else delta.text
        with_tokens = body.logprobs is not None or bool(body.return_token_ids)
        if not text and delta.finish_reason is None and not (with_tokens and (delta.token_ids or first)):
            return []
        extra = None
        if first and body.return_token_ids:
            extra = {"prompt_token_ids": self.prompts[delta.index // self.n]}
        return [
            writer.chunk(
                delta.index,
                text,
                logprobs=self._choice_logprobs(delta.index, delta.token_ids, delta.logprobs, self._echoed_entries(delta.prompt_logprobs)),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if body.return_token_ids else None,
                extra=extra,
            )
        ]

    def _choice_logprobs(
        self, index: int, token_ids: list[int], entries: list[TokenLogprobs] | None, prompt_entries: list[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        # After a stop string or an abort, the last tokens may lack logprobs: they are left out.
        known: list[TokenLogprobs | None] = [*prompt_entries, *(entries or [])]
        prompt = self.prompts[index // self.n][: len(prompt_entries)]
        tokens = [*prompt, *token_ids][: len(known)]
        shown = self.logprobs.completion(tokens, known, offset=self.offsets[index])
        if shown["tokens"]:
            self.offsets[index] = shown["text_offset"][-1] + self.logprobs.num_chars(tokens[-1])
        return shown

    def _echoed_entries(self, entries: list[TokenLogprobs | None] | None) -> list[TokenLogprobs | None]:
        return entries if self.body.echo and entries is not None else []

    def _echo(self, index: int) -> str:
        return self.echoed[index // self.n] if self.echoed else ""

    def _text_of(self, prompt: list[int]) -> str:
        with user_errors():
            return self.context.inputs.require_tokenizer("echo").decode(prompt, skip_special_tokens=False)


def _text_body(text: bytes) -> bytes:
    return b'"text":' + text

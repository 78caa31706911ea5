"""Beam search for the completion and chat routes: `use_beam_search`, with `n` beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from compile_and_serve.runtime.beam_search import Beam, BeamSearch
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.output_processor import CompletionOutput
from compile_and_serve.serve.context import ServerContext
from compile_and_serve.serve.errors import ApiError, ShuttingDownError, user_errors
from compile_and_serve.serve.http.responses import client_gone_response, until_disconnect
from compile_and_serve.serve.protocol.fields import GenerationFields

# Fields that change the choice of tokens or describe it. The values have no effect.
_EXCLUDED: dict[str, tuple[Any, ...]] = {
    "stop": ("", []),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
}


def check_beam_search(body: GenerationFields) -> None:
    """Raise a 400 for what beam search cannot do."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise ApiError(400, "length_penalty belongs to beam search: set use_beam_search.", "length_penalty")
        return
    if body.stream:
        raise ApiError(400, "Beam search cannot be streamed: set stream to false.", "stream")
    for name, without_effect in _EXCLUDED.items():
        value = getattr(body, name, None)
        if value is None or any(value == one and type(value) is not bool for one in without_effect) or value is False:
            continue
        raise ApiError(400, f"{name} cannot be combined with use_beam_search.", name)


async def answer_with_beams(
    body: GenerationFields,
    request: Request,
    context: ServerContext,
    prompts: list[list[int]],
    params: list[SamplingParams],
    complete: Callable[[list[CompletionOutput]], Response],
    **submit_options: Any,
) -> Response:
    """Search the continuations of all prompts together and answer with them. A client's disconnect ends the search.

    params: as prepared, `n` beams each. submit_options: further arguments of `AsyncEngine.submit`, request_id included.
    """
    if any(one.structured_outputs is not None for one in params):
        raise ApiError(400, "Tools that must be called cannot be combined with use_beam_search.", "use_beam_search")
    if context.inputs.info.max_source_len is not None:
        raise ApiError(400, "Beam search does not run models whose encoder reads the prompt.", "use_beam_search")
    tokenizer = context.inputs.tokenizer
    searches = []
    with user_errors():
        for one in params:
            eos = [] if one.ignore_eos or tokenizer is None else tokenizer.eos_token_ids
            search = BeamSearch(
                width=one.n,
                max_tokens=one.max_tokens or 0,
                end_ids=[*eos, *one.stop_token_ids],
                length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            )
            searches.append(search)

    async def work() -> Response:
        while any(search.alive for search in searches):
            steps = []
            for prompt, search in zip(prompts, searches, strict=True):
                step_params = search.step_params
                steps += [([*prompt, *beam.token_ids], step_params) for beam in search.alive]
            generation = await context.engine.submit(prompts=[ids for ids, _ in steps], params=[one for _, one in steps], **submit_options)
            try:
                extended = await generation.gather()
            finally:
                generation.close()
            left = iter(extended)
            for search in searches:
                ended = [next(left) for _ in search.alive]
                if any(not one.logprobs for one in ended):
                    raise ShuttingDownError
                search.advance([one.logprobs[0] for one in ended if one.logprobs])
        outputs = []
        for first, (search, one) in enumerate(zip(searches, params, strict=True)):
            outputs += [_output(context, first * one.n + i, beam, one) for i, beam in enumerate(search.results())]
        return complete(outputs)

    return await until_disconnect(request.receive, work()) or client_gone_response()


def _output(context: ServerContext, index: int, beam: Beam, params: SamplingParams) -> CompletionOutput:
    shown = list(beam.token_ids)
    last = shown[-1] if beam.ended else None
    if last is not None and not params.include_stop_str_in_output:
        shown.pop()
    text = ""
    if context.inputs.tokenizer is not None and params.detokenize:
        text = context.inputs.tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(beam.token_ids),
        finish_reason="stop" if beam.ended else "length",
        stop_reason=last if last in params.stop_token_ids else None,
    )

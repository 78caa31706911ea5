"""Fields that chat and completion requests share, their checks, and the way from a request to `SamplingParams`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.serve.errors import MAX_ECHO, ApiError, user_errors

logger = logging.getLogger(__name__)

MAX_COMPLETIONS = 128  # n of one prompt, as OpenAI limits it
_MAX_ID = 256  # characters of a request id or salt that a client may choose

_warned: set[str] = set()


class RequestModel(BaseModel):
    """A body that takes fields nobody knows: they are named in the log once and have no effect."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = Field(default=None, description="One of the names of /v1/models; may be left out.")


class StreamOptions(BaseModel):
    """How a stream reports its usage."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(default=None, description="The usage so far in every chunk.")


class GenerationFields(RequestModel):
    """Sampling, tracing and routing fields. None stands for the default."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, lt=2**31)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(
        default=None, description="Accepted; the tokenizers in use write special tokens without spaces anyway."
    )
    truncate_prompt_tokens: int | None = Field(default=None, description="Keep that many last tokens; -1: what fits.")
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[int, float] | None = None

    request_id: str | None = Field(default=None, max_length=_MAX_ID)
    priority: int | None = Field(
        default=0, ge=-(2**31), lt=2**31, description="Lower runs first; only with --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=_MAX_ID, description="Prefixes are shared only within one salt."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    user: str | None = Field(default=None, description="Accepted, has no effect.")


def _only(allowed: Iterable[Any], sentence: str) -> tuple[Callable[[Any], bool], str]:
    values = list(allowed)
    return (lambda value: any(value == v and type(value) is type(v) for v in values)), sentence


_STRUCTURED = "Structured output is not supported by this server yet."
# Fields whose effect a client would miss: field → (may it pass, the sentence otherwise). None always passes.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "response_format": (
        lambda value: isinstance(value, Mapping) and value.get("type") == "text",
        "Only the response_format of type 'text' is supported by this server yet.",
    ),
    "structured_outputs": _only((), _STRUCTURED),
    "guided_json": _only((), _STRUCTURED),
    "guided_regex": _only((), _STRUCTURED),
    "guided_choice": _only((), _STRUCTURED),
    "guided_grammar": _only((), _STRUCTURED),
    "structural_tag": _only((), _STRUCTURED),
    "use_beam_search": _only((False,), "Beam search is not supported: use n with a temperature above 0."),
    "length_penalty": _only((1, 1.0), "length_penalty belongs to beam search, which is not supported."),
    "early_stopping": _only((False,), "early_stopping belongs to beam search, which is not supported."),
    "best_of": _only((1,), "best_of is not supported: use n, and choose by logprobs."),
    "suffix": _only(("",), "suffix (fill in the middle) is not supported by this server yet."),
    "chat_template": _only((), "A chat template is not taken from requests: start the server with --chat-template."),
    "logits_processors": _only(([],), "logits_processors are not supported."),
    "functions": _only(([],), "functions are not supported: they were replaced by tools."),
    "function_call": _only(("none",), "function_call is not supported: it was replaced by tool_choice."),
    "modalities": _only((["text"],), "This server answers with text only."),
    "audio": _only((), "This server answers with text only."),
    "web_search_options": _only((), "This server does not search the web."),
    "prompt_embeds": _only((), "prompt_embeds are not supported by this server."),
    "mm_processor_kwargs": _only(({},), "This model reads text only."),
    "kv_transfer_params": _only((), "KV transfer is not supported by this server yet."),
    "thinking_token_budget": _only((), "thinking_token_budget is not supported by this server."),
    "include_reasoning": _only(
        (True,), "include_reasoning=false needs a reasoning parser, which is not supported yet."
    ),
}
# OpenAI's fields that change nothing in an answer of this server.
_HARMLESS = frozenset(
    {
        "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "prediction", "verbosity", "moderation",
    }
)  # fmt: skip


def check_fields(body: RequestModel) -> None:
    """400 for a known field that would have no effect here; a log line, once a name, for an unknown one."""
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED:
            passes, sentence = _REFUSED[name]
            if value is not None and not passes(value):
                raise ApiError(400, sentence, name)
        elif name not in _HARMLESS and name not in _warned and len(_warned) < 1000:
            _warned.add(name)
            logger.warning("Requests hold the unknown field '%s', which has no effect.", name[:MAX_ECHO])


def sampling_params(
    body: GenerationFields,
    defaults: Mapping[str, float | int],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """The request's `SamplingParams`, verified; `defaults` stand in for what it leaves out. names: as of `user_errors`."""
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed: set stream to false.", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true.", "stream_options")
    fields = (
        "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "seed", "stop_token_ids", "min_tokens", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
        "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words",
        "logit_bias",
    )  # fmt: skip
    given = {name: value for name in fields if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        if not all(_is_unicode(text) for text in given["stop"]):
            raise ApiError(400, "stop holds a lone surrogate, which is no valid Unicode character.", "stop")
    with user_errors(names):
        params = SamplingParams(**{**defaults, **given}, max_tokens=max_tokens, logprobs=logprobs)
        params.verify()
    return params


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)

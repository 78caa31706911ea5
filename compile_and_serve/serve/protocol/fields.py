"""Fields that chat and completion requests share, their checks, and the conversion to `SamplingParams`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from compile_and_serve.runtime.sampling_params import (
    MAX_BAD_WORDS,
    MAX_PATTERN_SIZE,
    MAX_REPEATED_TOKENS,
    MAX_STOP_STRINGS,
    RepetitionDetectionParams,
    SamplingParams,
)
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.serve.errors import MAX_ECHO, ApiError, user_errors
from compile_and_serve.serve.protocol.client_parts import warn_once
from compile_and_serve.serve.protocol.structured import structured_params

logger = logging.getLogger(__name__)

MAX_COMPLETIONS = 128  # largest n, as in OpenAI's API
MAX_ID = 256  # characters of a client's request id or cache salt

_OLDER_FORMS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "guided_whitespace_pattern")
_SHOWN = 10  # wrong entries of one field that a message names

_warned: set[str] = set()  # names that this process has logged


def _check_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    wrong = [
        f"{token_id!r:.50}: {bias!r:.50}"
        for token_id, bias in value.items()
        if not str(token_id).isdecimal() or isinstance(bias, bool) or not isinstance(bias, (int, float))
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"token ids must map to numbers, got {', '.join(wrong[:_SHOWN])}{more}")
    return value


class _FailFast:
    """Stops the validation of a list at its first wrong element.

    pydantic builds an error for every wrong element otherwise. Its own `FailFast` cannot be part of a union.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


Integers = Annotated[list[int], _FailFast()]
Strings = Annotated[list[str], _FailFast()]
Objects = Annotated[list[dict[str, Any]], _FailFast()]
Stop = Annotated[
    str | Strings, Field(description=f"At most {MAX_STOP_STRINGS} texts, none empty.", json_schema_extra={"maxItems": MAX_STOP_STRINGS})
]
LogitBias = Annotated[dict[int, float], BeforeValidator(_check_bias)]


# Limits that `SamplingParams.verify` checks are only documented here.
_PENALTY: dict[str, Any] = {"minimum": -2, "maximum": 2}


class RequestModel(BaseModel):
    """A body that accepts unknown fields. They have no effect, and each name is logged once."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = Field(default=None, description="One of the names listed by /v1/models; optional.")

    @classmethod
    def known_fields(cls) -> set[str]:
        """Names of the model's fields and of the other fields that `check_fields` knows."""
        return {*cls.model_fields, *_REFUSED, *_LEFT_OUT, *_HARMLESS}


class StreamOptions(BaseModel):
    """How a stream reports its usage."""

    include_usage: bool | None = Field(default=None, description="End with a chunk that has the whole request's usage.")
    continuous_usage_stats: bool | None = Field(default=None, description="Put the usage so far into every chunk.")


class RepetitionDetection(BaseModel):
    """The output ends when it ends with `min_count` copies of one pattern of tokens."""

    max_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN_SIZE, description="Tokens of the longest pattern; 0: off.")
    min_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN_SIZE, description="Tokens of the shortest pattern; 0: one.")
    min_count: int = Field(default=0, ge=0, le=MAX_REPEATED_TOKENS)


class SamplingFields(RequestModel):
    """Sampling and routing fields of every API that generates text. None means the default."""

    temperature: float | None = Field(default=None, json_schema_extra={"minimum": 0})
    top_p: float | None = Field(default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    top_k: int | None = Field(default=None, lt=2**31, description="0 and -1: off.", json_schema_extra={"minimum": -1})
    min_p: float | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 1})
    presence_penalty: float | None = Field(default=None, json_schema_extra=_PENALTY)
    frequency_penalty: float | None = Field(default=None, json_schema_extra=_PENALTY)
    repetition_penalty: float | None = Field(default=None, json_schema_extra={"minimum": 0.01})
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop_token_ids: Integers | None = None
    min_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 0})
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Integers | None = Field(default=None, json_schema_extra={"minItems": 1})
    bad_words: Strings | None = Field(default=None, json_schema_extra={"maxItems": MAX_BAD_WORDS})
    logit_bias: LogitBias | None = None
    repetition_detection: RepetitionDetection | None = Field(
        default=None, description='Ends an output that repeats itself, with the finish reason "repetition".'
    )
    speculate: bool | None = Field(default=None, description="False keeps the request out of speculative decoding, which changes no token.")
    priority: int | None = Field(
        default=0, ge=-(2**31), lt=2**31, description="Lower values run first; needs --scheduling-policy priority."
    )
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID, description="Requests share cached prefixes only with requests of the same salt."
    )


class GenerationFields(SamplingFields):
    """Sampling, tracing and routing fields. None means the default."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MAX_COMPLETIONS)
    max_tokens: int | None = Field(default=None, json_schema_extra={"minimum": 0})
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = Field(
        default=None, description="Accepted without effect: special tokens are always written without spaces."
    )
    truncate_prompt_tokens: int | None = Field(default=None, description="Keep only this many tokens of the prompt; -1: as many as fit.")
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Where truncate_prompt_tokens cuts tokens off; by default left."
    )
    prompt_logprobs: int | None = Field(default=None, description="-1: the whole vocabulary.", json_schema_extra={"minimum": -1})
    logprob_token_ids: Integers | None = Field(
        default=None, description="Return the log-probabilities of these tokens instead of the likeliest ones; needs logprobs."
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description='{"type": "text"}, "json_object", "json_schema" or "structural_tag".'
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="One of json, json_object, regex, choice, grammar and structural_tag."
    )

    guided_json: str | dict[str, Any] | bool | None = Field(default=None, description="vLLM's older name of structured_outputs.json.")
    guided_regex: str | None = Field(default=None, description="vLLM's older name of structured_outputs.regex.")
    guided_choice: Strings | None = Field(default=None, description="vLLM's older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(default=None, description="vLLM's older name of structured_outputs.grammar.")
    structural_tag: str | dict[str, Any] | None = Field(default=None, description="vLLM's older name of structured_outputs.structural_tag.")
    guided_whitespace_pattern: str | None = Field(default=None, description="vLLM's older name of structured_outputs.whitespace_pattern.")

    use_beam_search: bool | None = Field(default=None, description="Return the n likeliest completions, best first.")
    length_penalty: float | None = Field(default=None, description="Of beam search: above 0 favors long completions; 1 by default.")
    request_id: str | None = Field(default=None, max_length=MAX_ID)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    include_ledger: bool | None = Field(
        default=None, description="Add `usage.ledger`: what the request waited for, computed and reused, and why not more."
    )
    user: str | None = Field(default=None, description="Who of the API key's users it is, for --fair-by-user.")
    kv_transfer_params: dict[str, Any] | None = Field(
        default=None, description="Of a request that one engine begins and another continues, in vLLM's form; see --kv-transfer-config."
    )

    def names(self) -> dict[str, str]:
        """Field names of other endpoints and of the engine → this request's names for them."""
        older = self._older_forms()
        if self.response_format is not None:
            return {"structured_outputs": "response_format"}
        return {"structured_outputs": next(iter(older))} if older else {}

    def structure(self, *, open_schemas: bool) -> StructuredOutputsParams | None:
        """The form that the output must have. open_schemas: see `structured_params`. Raises a 400."""
        older = self._older_forms()
        if older and self.structured_outputs is not None:
            raise ApiError(400, f"{next(iter(older))} and structured_outputs cannot be combined.", next(iter(older)))
        fields = {name.removeprefix("guided_"): value for name, value in older.items()}
        return structured_params(self.response_format, fields or self.structured_outputs, open_schemas=open_schemas)

    def _older_forms(self) -> dict[str, Any]:
        """The fields that vLLM had before structured_outputs, with their values."""
        return {name: value for name in _OLDER_FORMS if (value := getattr(self, name)) is not None}


def _only(allowed: Iterable[Any], sentence: str) -> tuple[Callable[[Any], bool], str]:
    values = list(allowed)
    return (lambda value: any(value == v and type(value) is type(v) for v in values)), sentence


# Known fields that this server cannot honour: field → (which values are accepted, the message for others). null is accepted.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "early_stopping": _only((False,), "early_stopping is not supported: beam search ends when no beam can improve."),
    "best_of": _only((1,), "best_of is not supported: use n and choose by logprobs."),
    "suffix": _only(("",), "This server does not support suffix (fill in the middle) yet."),
    "chat_template": _only((), "Requests cannot bring a chat template: start the server with --chat-template."),
    "logits_processors": _only(([],), "logits_processors are not supported."),
    "functions": _only(([],), "functions are not supported: OpenAI replaced them by tools."),
    "function_call": _only(("none",), "function_call is not supported: OpenAI replaced it by tool_choice."),
    "modalities": _only((["text"],), "This server answers with text only."),
    "audio": _only((), "This server answers with text only."),
    "prompt_embeds": _only((), "This server does not support prompt_embeds."),
    "mm_processor_kwargs": _only(({},), "This model reads text only."),
    "kv_transfer_params": _only(({},), "kv_transfer_params are supported on /v1/chat/completions and /v1/completions."),
    "thinking_token_budget": _only((), "thinking_token_budget is supported on /v1/chat/completions."),
}
# Fields that ask for what this server does not do, and that a conversation can do without: field → why.
_LEFT_OUT = {"web_search_options": "this server does not search the web"}
# OpenAI's fields that do not change this server's answers.
_HARMLESS = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "verbosity",
        "moderation",
        "guided_decoding_backend",  # vLLM's choice of a library
    }
)


def check_fields(body: RequestModel, *, priority: int | None = None, priorities: bool = True) -> None:
    """Raise a 400 for a known field that this server cannot honour. Log an unknown field, once per name.

    priority: the request's. priorities: whether they have an effect on this server.
    """
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED:
            passes, sentence = _REFUSED[name]
            if value is not None and not passes(value):
                raise ApiError(400, sentence, name)
        elif name in _LEFT_OUT:
            if value is not None:
                warn_once(f"Requests contain {name}, which has no effect: {_LEFT_OUT[name]}.")
        elif name not in _HARMLESS and name not in _warned and len(_warned) < 1000:
            _warned.add(name)
            logger.warning("Requests contain the unknown field %r, which has no effect.", name[:MAX_ECHO])
    if priority and not priorities:
        raise ApiError(
            400,
            f"priority is {priority}, but requests run in the order of arrival: leave it out, or start the server with "
            "--scheduling-policy priority.",
            "priority",
        )


def sampling_params(
    body: GenerationFields,
    defaults: Mapping[str, float | int],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str] | None = None,
    open_schemas: bool = False,
) -> SamplingParams:
    """The request's `SamplingParams`, verified.

    defaults: values of missing fields; max_tokens among them is also the most that a request gets.
    names: see `user_errors`. open_schemas: see `structured_params`.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed: set stream to false.", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true.", "stream_options")
    fields = (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "min_tokens",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "prompt_logprobs",
        "logprob_token_ids",
        "allowed_token_ids",
        "bad_words",
        "speculate",
        "logit_bias",
    )
    given = {name: value for name in fields if (value := getattr(body, name)) is not None}
    given["structured_outputs"] = body.structure(open_schemas=open_schemas)
    if body.repetition_detection is not None:
        given["repetition_detection"] = RepetitionDetectionParams(**body.repetition_detection.model_dump())
    if body.stop is not None:
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop

    limits = [limit for limit in (max_tokens, defaults.get("max_tokens")) if limit is not None]
    given["max_tokens"] = min(limits, default=None)

    with user_errors(names):
        params = SamplingParams(**{**defaults, **given}, logprobs=logprobs)
        params.verify()
    return params

"""Stream chunks and usage. Fields that do not change are encoded once per stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput

_encode = msgspec.json.encode


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request. cached_tokens: prompt tokens that were found in the prefix cache.

    with_details: whether clients see cached_tokens. reasoning_tokens: None if the answer has no reasoning.
    draft_tokens, accepted_tokens: of speculative decoding.
    """

    prompt_tokens: int
    with_details: bool
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, output: CompletionDelta | CompletionOutput) -> None:
        """Count the tokens of a completion, or of a delta."""
        self.completion_tokens += len(output.token_ids)
        self.draft_tokens += output.num_draft_tokens
        self.accepted_tokens += output.num_accepted_drafts

    @property
    def shown_cached_tokens(self) -> int:
        """cached_tokens for APIs where the field is a number; 0 without details."""
        return self.cached_tokens if self.with_details else 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} if self.with_details else None,
        }
        details: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.draft_tokens:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.draft_tokens - self.accepted_tokens
        if details:
            usage["completion_tokens_details"] = details
        return usage


class ChunkWriter:
    """Server-sent events of one streamed answer.

    head: fields that are equal in every chunk (id, object, created, model …). body: turns a text, encoded as JSON, into the
    part of a choice that holds it, such as `"text":"abc"`. usage_in_chunks: None leaves usage out, False writes null, True
    writes the usage so far.
    """

    def __init__(self, head: Mapping[str, Any], body: Callable[[bytes], bytes], *, usage: Usage, usage_in_chunks: bool | None) -> None:
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._body = body
        self._usage = usage
        self._usage_in_chunks = usage_in_chunks

    def chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: Sequence[int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        """One event with one choice; `extra`: further fields of the chunk."""
        return self.raw_chunk(
            index,
            self._body(_encode(text)),
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=token_ids,
            extra=extra,
        )

    def raw_chunk(
        self,
        index: int,
        body: bytes,
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: Sequence[int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        """`chunk` for a body that is already encoded."""
        parts = [self._head, b'{"index":%d,' % index, body]
        parts.append(b',"logprobs":' + (b"null" if logprobs is None else _encode(logprobs)))
        parts.append(b',"finish_reason":' + (b"null" if finish_reason is None else _encode(finish_reason)))
        if finish_reason is not None:
            parts.append(b',"stop_reason":' + _encode(stop_reason))
        if token_ids is not None:
            parts.append(b',"token_ids":' + _encode(token_ids))
        parts.append(b"}]")
        if extra:
            parts.append(b"," + _encode(extra)[1:-1])
        if self._usage_in_chunks is not None:
            parts.append(b',"usage":' + (_encode(self._usage.as_dict()) if self._usage_in_chunks else b"null"))
        parts.append(b"}\n\n")
        return b"".join(parts)

    def usage_chunk(self) -> bytes:
        """The last event before [DONE]: no choices, and the usage of the whole request."""
        return self._head + b'],"usage":' + _encode(self._usage.as_dict()) + b"}\n\n"

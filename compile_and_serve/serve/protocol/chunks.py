"""Stream chunks. Fields that do not change are encoded once per stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from compile_and_serve.serve.protocol.usage import Usage

_encode = msgspec.json.encode


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

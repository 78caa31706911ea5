"""Token ids → text, one token at a time. Every delta is whole characters, and stop strings are never shown.

A `Detokenizer` turns tokens into characters; `TextStream` adds stop strings. The cost of a token does not depend on the
length of the text. The concatenated deltas are the text, so streamed and whole responses are the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from compile_and_serve.runtime.text.tokenizer import Tokenizer

# Limit of tokens without complete text: the 4 bytes of a character, and as many tokens without text of their own.
_MAX_PENDING = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The state of one sequence between tokens."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """The rest at the end of the sequence. Bytes of incomplete characters become U+FFFD."""
        ...


def make_detokenizer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    """A detokenizer for the tokens that follow `prompt_token_ids`."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes (GPT-2 family), where an incremental UTF-8 decoder is exact."""

    __slots__ = ("_decode", "_skip", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For other tokenizers: decodes a short window without and with the pending tokens; the new text is the difference.

    The window keeps the last complete tokens as context, because decoders treat the first token specially. For example,
    SentencePiece drops its leading space.
    """

    __slots__ = ("_context", "_pending", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = list(prompt_token_ids[-_MAX_PENDING:])
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        before, text = self._texts()
        is_incomplete = text.endswith(_REPLACEMENT) or len(text) <= len(before)
        if is_incomplete and len(self._pending) < _MAX_PENDING:
            return ""
        return self._emit(before, text)

    def flush(self) -> str:
        if not self._pending:
            return ""
        return self._emit(*self._texts())

    def _texts(self) -> tuple[str, str]:
        """The text of the context, as far as it does not change, and the text of context and pending tokens."""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        while before.endswith(_REPLACEMENT) and not text.startswith(before):
            before = before[:-1]  # an incomplete character, e.g. of the prompt, that is being completed
        return before, text

    def _emit(self, before: str, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class TextStream:
    """The text of one sequence with its stop strings applied.

    `push` returns text that may be shown. Text that may be the beginning of a stop string is held back until that is
    decided. The stop string whose last character comes first ends the text. The first `min_tokens` tokens are not searched.
    include_stop: show the stop string too. stopped_by: the stop string that ended the text, else None.
    """

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_min_tokens", "_num_tokens", "_starts", "_stop", "stopped_by")

    def __init__(self, detokenizer: Detokenizer, *, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._starts = frozenset(text[0] for text in self._stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that may be shown after this token. If `stopped_by` is set then, push no more tokens."""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The rest of a sequence that no stop string has ended, including text that was held back."""
        text = self._take(self._detokenizer.flush())
        held, self._held = self._held, ""
        return text if self.stopped_by is not None else text + held

    def _take(self, delta: str) -> str:
        if not self._stop:
            return delta
        if not delta:
            return ""
        text = self._held + delta
        if self._num_tokens <= self._min_tokens:
            return text
        # Every possible match begins inside the held text, so earlier text need not be searched again.
        match = self._first_match(text)
        if match is not None:
            start, stop = match
            self.stopped_by, self._held = stop, ""
            return text[: start + len(stop)] if self._include_stop else text[:start]
        keep = self._length_of_possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _length_of_possible_start(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stop) - 1
        tail = text[-longest:] if longest else ""
        if self._starts.isdisjoint(tail):
            return 0
        for length in range(len(tail), 0, -1):
            suffix = tail[-length:]
            if suffix[0] in self._starts and any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0

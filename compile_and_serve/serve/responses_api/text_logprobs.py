"""Log-probabilities of a message's text: which of the generated tokens it consists of."""

from __future__ import annotations

from typing import Any

from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.protocol.logprobs import LogprobsWriter


class TextLogprobs:
    """Finds the tokens of each piece of text that the parsers pass on, by the tokens' bytes.

    Tokens of markers, of reasoning and of tool calls belong to no message. A parser may hold text back, so tokens wait until their
    text comes. skips_special_tokens: special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._writer = LogprobsWriter(tokenizer, as_ids=as_ids)
        self._skipped = tokenizer.special_ids if skips_special_tokens else frozenset()
        self._bytes = b""  # that no piece had yet
        # Tokens with such bytes: where they begin and end in them, and their entry; None if it was taken.
        self._tokens: list[tuple[int, int, TokenLogprobs | None]] = []

    def add(self, output: CompletionDelta | CompletionOutput) -> None:
        """Generated tokens."""
        for token_id, entry in zip(output.token_ids, output.logprobs or (), strict=False):
            begin = len(self._bytes)
            self._bytes += b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
            self._tokens.append((begin, len(self._bytes), entry))

    def take(self, text: str, *, begins: bool) -> list[dict[str, Any]]:
        """The entries of a piece's tokens, in OpenAI's form. A token that is in two pieces belongs to the first.

        begins: the piece begins an item, so markers may precede it. A text that the tokens do not contain, for example because
        it has a replacement character, takes all tokens that wait.
        """
        raw = text.encode()
        at = self._bytes.rfind(raw) if begins else self._bytes.find(raw)
        begin, end = (at, at + len(raw)) if at >= 0 else (0, len(self._bytes))
        taken = [entry for first, last, entry in self._tokens if first < end and last > begin and entry is not None]
        self._bytes = self._bytes[end:]
        self._tokens = [
            (first - end, last - end, entry if first >= end else None)
            for first, last, entry in self._tokens
            if last > end or (first >= end and at >= 0)
        ]
        content: list[dict[str, Any]] = self._writer.chat(taken)["content"]
        return content

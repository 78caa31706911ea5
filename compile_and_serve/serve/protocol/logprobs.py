"""Log-probabilities in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # stands for minus infinity, which JSON lacks
_TOKENS_PER_TURN = 256  # of the event loop: they take about half a millisecond


class LogprobsWriter:
    """Writes the log-probabilities of one request. as_ids: write tokens as "token_id:123" instead of their text."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def token(self, token_id: int) -> str:
        """The token's text, or "token_id:N"."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def num_chars(self, token_id: int) -> int:
        """The number of characters whose first byte is in this token."""
        raw = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return sum(byte & 0xC0 != 0x80 for byte in raw)

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat completion."""
        content = []
        for entry in entries:
            top = [self._chat_token(i, p) for i, p in zip(entry.ids[1:], entry.logprobs[1:], strict=True)]
            content.append({**self._chat_token(entry.ids[0], entry.logprobs[0]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], *, offset: int) -> dict[str, Any]:
        """`choices[].logprobs` of a completion. offset: where the first token begins in the text.

        entries: None for a token without log-probabilities.
        """
        tokens: list[str] = []
        offsets: list[int] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            name = self._key(token_id)
            tokens.append(name)
            offsets.append(offset)
            offset += self.num_chars(token_id)
            if entry is None:
                chosen.append(None)
                top.append(None)
            else:
                chosen.append(_finite(entry.logprobs[0]))
                # An entry begins with the chosen token. The answer begins with the most likely one, and of two tokens with
                # one name it keeps the more likely.
                sampled, *ranked = zip(entry.ids, entry.logprobs, strict=True)
                by_name: dict[str, float] = {}
                for ranked_id, logprob in [*ranked, sampled]:
                    by_name.setdefault(self._key(ranked_id), _finite(logprob))
                top.append(by_name)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: per prompt token, token id → {logprob, rank, decoded_token}; None for the first token."""
        return [None if entry is None else self._ranked(entry) for entry in entries]

    async def prompt_json(self, entries: Sequence[TokenLogprobs | None]) -> msgspec.Raw:
        """`prompt` as JSON. The event loop runs other work between its parts."""
        written = []
        for part in _parts(entries):
            written.append(msgspec.json.encode(self.prompt(entries[part]))[1:-1])
            await asyncio.sleep(0)
        return msgspec.Raw(b"[" + b",".join(written) + b"]")

    async def echoed(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`completion` of a prompt. The event loop runs other work between its parts."""
        whole: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        offset = 0
        for part in _parts(entries):
            for name, values in self.completion(token_ids[part], entries[part], offset=offset).items():
                whole[name] += values
            offset = whole["text_offset"][-1] + self.num_chars(token_ids[part][-1])
            await asyncio.sleep(0)
        return whole

    def _key(self, token_id: int) -> str:
        """A name that tells tokens apart: a token that holds part of a character is named by its bytes, as OpenAI does."""
        name = self.token(token_id)
        if "\ufffd" not in name or self._tokenizer is None:
            return name
        raw = self._tokenizer.token_bytes(token_id)
        return name if raw == name.encode() else "bytes:" + repr(raw)[2:-1]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, Any]:
        ranked: dict[str, Any] = {}
        for position, (token_id, logprob) in enumerate(zip(entry.ids, entry.logprobs, strict=True)):
            rank = entry.rank_at(position)
            text = self.token(token_id)
            ranked.setdefault(str(token_id), {"logprob": _finite(logprob), "rank": rank, "decoded_token": text})
        return ranked

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))
        return {"token": self.token(token_id), "logprob": _finite(logprob), "bytes": raw}


def _parts(entries: Sequence[TokenLogprobs | None]) -> Iterator[slice]:
    """Entries of about _TOKENS_PER_TURN tokens each."""
    begin = num_tokens = 0
    for end, entry in enumerate(entries, 1):
        num_tokens += 0 if entry is None else len(entry.ids)
        if num_tokens >= _TOKENS_PER_TURN or end == len(entries):
            yield slice(begin, end)
            begin, num_tokens = end, 0


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)

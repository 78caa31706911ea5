"""`DistinctItems`: where a JSON output is in its arrays, and the tokens that would repeat an item (see `distinct`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import llguidance
import numpy as np

from compile_and_serve.runtime.structured.distinct import ANY_PROPERTY, ITEM, ROOT, Rules

_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_OPENERS, _CLOSERS = b"{[", b"}]"
_MAX_BYTES = 64  # of a token that is looked at


class TokenTexts:
    """The bytes of a vocabulary's tokens (none of special ones), and those that can close a string.

    closing: bytes before the only quote of a token without escapes → ids. others: ids of other tokens with quotes. quoted: of all tokens
    with quotes. whole: ids of tokens that can begin an array and close two of its strings.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.closing: dict[bytes, list[int]] = {}
        others = []
        for token, text in enumerate(texts):
            if text.count(b'"') == 1 and b"\\" not in text:
                self.closing.setdefault(text[: text.index(b'"')], []).append(token)
            elif b'"' in text:
                others.append(token)
        self.others = np.array(others, dtype=np.int64)
        self.quoted = np.array([token for token, text in enumerate(texts) if b'"' in text], dtype=np.int64)
        whole = [token for token in others if texts[token].partition(b"[")[2].count(b'"') >= 4]
        self.whole = np.array(whole, dtype=np.int64)

    @classmethod
    def of(cls, tokenizer: llguidance.LLTokenizer) -> TokenTexts:
        special, decode = tokenizer.is_special_token, tokenizer.decode_bytes
        return cls([b"" if special(token) else decode([token]) for token in range(tokenizer.vocab_size)])


@dataclass(frozen=True, slots=True)
class DistinctGrammar:
    """What all sequences of a grammar share. rules: UTF-8 of the values by place."""

    rules: dict[str, frozenset[bytes] | None]
    texts: TokenTexts

    @classmethod
    def create(cls, rules: Rules, texts: TokenTexts) -> DistinctGrammar:
        return cls({k: None if values is None else frozenset(v.encode() for v in values) for k, values in rules.items()}, texts)


class _Frame(NamedTuple):
    """An open object or array. key: of the object's last property. ruled: whether items must be distinct; seen: the strings so far."""

    is_array: bool
    ruled: bool = False
    values: frozenset[bytes] | None = None
    seen: frozenset[bytes] = frozenset()
    key: str = ""
    expects_key: bool = True


@dataclass(slots=True)
class DistinctItems:
    """The state of one sequence."""

    grammar: DistinctGrammar
    _frames: list[_Frame] = field(default_factory=list)
    _text: bytearray | None = None  # the open string
    _escaped: bool = False

    def copy(self) -> DistinctItems:
        """An independent copy."""
        text = None if self._text is None else bytearray(self._text)
        return DistinctItems(self.grammar, self._frames.copy(), text, self._escaped)

    def advance(self, token: int) -> None:
        """Follow a token of the output."""
        self._read(self.grammar.texts.texts[token])

    def exclude(self, mask_W: np.ndarray) -> None:
        """Clear the bits of the tokens that would repeat an item. mask_W: int32, one bit per token."""
        frame = self._frames[-1] if self._frames else None
        texts, banned = self.grammar.texts, list[int]()
        if frame is None or not frame.ruled:
            banned = self._repeating(_allowed(mask_W, texts.whole))
        elif frame.values is not None:
            allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()
            if len(allowed) > len(texts.texts) // 2:  # any string may be here, so it is not one of the values and can go on
                allowed = _allowed(mask_W, texts.quoted)
            banned = self._repeating(allowed)
        else:
            banned = self._repeating(_allowed(mask_W, texts.others))
            if (begun := self._text) is not None:
                for text in frame.seen:
                    if text.startswith(begun):
                        banned += texts.closing.get(text[len(begun) :], ())
        if banned:
            ids = np.array(banned, dtype=np.int64)
            np.bitwise_and.at(mask_W.view(np.uint32), ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))

    def _repeating(self, tokens: Iterable[int]) -> list[int]:
        texts = self.grammar.texts.texts
        return [token for token in tokens if len(texts[token]) > _MAX_BYTES or (texts[token] and not self.copy()._read(texts[token]))]

    def _read(self, text: bytes) -> bool:
        """Follow a piece of the output. False if it repeats an item, or can only go on to do so."""
        distinct = True
        for byte in text:
            if self._text is None:
                self._structure(byte)
            elif self._escaped or byte != _QUOTE:
                self._text.append(byte)
                self._escaped = byte == _BACKSLASH and not self._escaped
            else:
                distinct = self._close_string() and distinct
        return distinct and not self._is_stuck()

    def _structure(self, byte: int) -> None:
        frames = self._frames
        if byte == _QUOTE:
            self._text = bytearray()
        elif byte in _OPENERS:
            frames.append(self._opened(is_array=byte == ord("[")))
        elif byte in _CLOSERS and frames:
            frames.pop()
        elif byte == _COMMA and frames and not frames[-1].is_array:
            frames[-1] = frames[-1]._replace(expects_key=True)

    def _opened(self, *, is_array: bool) -> _Frame:
        if not is_array:
            return _Frame(False)
        above = self._frames[-1] if self._frames else None
        place = ROOT if above is None else ITEM if above.is_array else "." + above.key
        rules = self.grammar.rules
        found = place if place in rules else ANY_PROPERTY if place[0] == "." else None
        if found is None or found not in rules:
            return _Frame(True)
        return _Frame(True, True, rules[found])

    def _close_string(self) -> bool:
        assert self._text is not None
        text, self._text = bytes(self._text), None
        frame = self._frames[-1] if self._frames else None
        if frame is None:
            return True
        if frame.is_array:
            is_new = text not in frame.seen
            if frame.ruled:
                self._frames[-1] = frame._replace(seen=frame.seen | {text})
            return is_new
        if frame.expects_key:
            key = json.loads(b'"' + text + b'"') if b"\\" in text else text.decode(errors="replace")
            self._frames[-1] = frame._replace(key=key, expects_key=False)
        return True

    def _is_stuck(self) -> bool:
        """Whether the open string can only become one of the values that the array already has."""
        frame = self._frames[-1] if self._frames else None
        if self._text is None or frame is None or not frame.is_array or frame.values is None:
            return False
        possible = {value for value in frame.values if value.startswith(self._text)}
        return bool(possible) and possible <= frame.seen


def _allowed(mask_W: np.ndarray, tokens: np.ndarray) -> list[int]:
    bits = mask_W.view(np.uint32)[tokens // 32] >> (tokens % 32).astype(np.uint32)
    allowed: list[int] = tokens[bits & 1 == 1].tolist()
    return allowed

"""Special tokens in untrusted text: a user who writes `<|im_end|>` must not end a turn.

Before a conversation is rendered, `Placeholders.hide` replaces them by digits, which every template passes on. `Placeholders.restore` finds
the digits in the rendered text and says where the text stands that is ordinary although it reads like special tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_TRUSTED_ROLES = ("assistant", "model")  # what the model wrote may hold its control tokens
_INDEX_DIGITS = 6


class ChatText(NamedTuple):
    """A rendered conversation.

    ordinary: sorted (begin, end) of parts of `text` that are not special tokens, whatever they read like.
    """

    text: str
    ordinary: Sequence[tuple[int, int]] = ()

    def cut(self, begin: int, end: int) -> ChatText:
        """The part from character `begin` to `end`."""
        spans = ((max(first, begin), min(last, end)) for first, last in self.ordinary)
        return ChatText(self.text[begin:end], [(first - begin, last - begin) for first, last in spans if first < last])

    def around_ordinary(self) -> Iterable[tuple[str, str]]:
        """The text as pairs: what stands before an ordinary part, and that part. The last pair has no such part."""
        at = 0
        for begin, end in self.ordinary:
            yield self.text[at:begin], self.text[begin:end]
            at = end
        yield self.text[at:], ""


class HasSpecialTokens(Protocol):
    """What hiding needs of a tokenizer."""

    @property
    def special_pattern(self) -> re.Pattern[str]: ...

    @property
    def special_beginnings(self) -> frozenset[str]: ...


class Placeholders:
    """Placeholders of one conversation. Clients cannot guess them: they begin with random digits."""

    def __init__(self, tokenizer: HasSpecialTokens) -> None:
        self._pattern = tokenizer.special_pattern
        self._beginnings = tokenizer.special_beginnings
        self._nonce = f"{secrets.randbelow(10**12):012d}"
        self._indices: dict[str, int] = {}

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value without special tokens in its texts. Keys of objects stay as they are."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._placeholder(match[0]), value)
        if isinstance(value, list):
            # A template may join texts, so that parts of two become a special token.
            return [self._hide_beginning(self.hide(one)) if i + 1 < len(value) else self.hide(one) for i, one in enumerate(value)]
        if isinstance(value, Mapping):
            return {key: self.hide(one) for key, one in value.items()}
        return value

    def hide_in_messages(self, messages: Sequence[Any]) -> list[Any]:
        """The messages, those of the assistant unchanged."""
        is_trusted = (isinstance(message, Mapping) and message.get("role") in _TRUSTED_ROLES for message in messages)
        return [message if trusted else self.hide(message) for message, trusted in zip(messages, is_trusted, strict=True)]

    def restore(self, rendered: str) -> ChatText:
        """The rendered text with the hidden texts back in their places."""
        if not self._indices:
            return ChatText(rendered)
        hidden = list(self._indices)
        parts: list[str] = []
        ordinary: list[tuple[int, int]] = []
        at = 0
        pieces = re.split(rf"{self._nonce}(\d{{{_INDEX_DIGITS}}})", rendered)
        for piece, index in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            parts.append(piece)
            at += len(piece)
            if index is not None:
                parts.append(hidden[int(index)])
                ordinary.append((at, at + len(parts[-1])))
                at = ordinary[-1][1]
        return ChatText("".join(parts), ordinary)

    def _placeholder(self, text: str) -> str:
        return f"{self._nonce}{self._indices.setdefault(text, len(self._indices)):0{_INDEX_DIGITS}d}"

    def _hide_beginning(self, part: Any) -> Any:
        """A text, or a part with a text, whose end could begin a special token."""
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            return {**part, "text": self._hide_beginning(text)}
        if not isinstance(part, str):
            return part
        longest = max(map(len, self._beginnings), default=0)
        for size in range(min(longest, len(part)), 0, -1):
            if part[-size:] in self._beginnings:
                return part[:-size] + self._placeholder(part[-size:])
        return part


def pattern_of(texts: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of the texts at a place, in time that does not depend on how many there are."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        branches = [re.escape(char) + expression(below) for char, below in node.items() if char]
        if not branches:
            return ""
        inner = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return inner + ("?" if "" in node else "")

    return re.compile(expression(tree) if tree else r"(?!)")

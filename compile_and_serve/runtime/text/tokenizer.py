"""`Tokenizer`: text ↔ token ids, end-of-sequence ids, the exact bytes of a token, and the model's chat templates.

Backed by the `tokenizers` package. `load_tokenizer.py` loads one from a model's files.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property

import tokenizers

from compile_and_serve.runtime.text.special_text import ChatText, pattern_of

# Up to this many characters or ids, a call takes at most a millisecond and may hold the GIL. For longer ones, the batch
# calls are used: they cost more to start but release the GIL.
_SHORT = 4096


class TokenizerError(ValueError):
    """The tokenizer cannot be loaded or cannot encode a text. The message is one sentence for the user."""


class Tokenizer:
    """Converts between text and token ids with a `tokenizers.Tokenizer`, whose truncation and padding are turned off.

    special_tokens: name, e.g. "bos_token" → text. eos_token_ids: further ids that end a generation; the attribute of that
    name lists the tokenizer's own first. chat_templates: name → Jinja source; "default" is the usual one. source: what it
    was loaded from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        source: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})
        self.source = source
        eos = special_tokens.get("eos_token")
        ids = list(eos_token_ids)
        if eos is not None and (own := backend.token_to_id(eos)) is not None:
            ids.insert(0, own)
        self.eos_token_ids: list[int] = list(dict.fromkeys(ids))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._byte_rule = _byte_rule(backend)
        self._bytes: dict[int, bytes] = {}

    @property
    def is_byte_level(self) -> bool:
        """Whether a text's bytes are the concatenated bytes of its tokens (GPT-2 family)."""
        return self._byte_rule == "byte_level"

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """Text of each special token → id."""
        return {text: token_id for token_id in sorted(self.special_ids) if (text := self.backend.id_to_token(token_id)) is not None}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches special tokens in a text."""
        return pattern_of(self.special_texts)

    @cached_property
    def special_beginnings(self) -> frozenset[str]:
        """Proper beginnings of special tokens."""
        return frozenset(text[:size] for text in self.special_texts for size in range(1, len(text)))

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token in characters: a text of n characters has at least n / max_token_chars tokens."""
        return max((len(token) for token in self.backend.get_vocab(with_added_tokens=True)), default=1)

    def to_json(self) -> str:
        """The tokenizer as the content of a tokenizer.json."""
        return self.backend.to_str()

    def encode(self, text: str | ChatText, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens that it contains as text become their ids, except in the ordinary parts of a `ChatText`.

        add_special_tokens: add what the model expects around a text, e.g. the beginning-of-sequence token. Releases the GIL
        for long texts. Raises `TokenizerError` for a text with a lone surrogate.
        """
        if isinstance(text, ChatText):
            if text.ordinary:
                return self._ordinary_encoder.encode(text, add_special_tokens)
            text = text.text
        return _encode(self.backend, text, add_special_tokens)

    @cached_property
    def _ordinary_encoder(self) -> _OrdinaryEncoder:
        return _OrdinaryEncoder(self.backend)

    def encode_pair(self, text: str, pair: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of two texts, joined as the tokenizer's template says. Raises `TokenizerError` as `encode` does."""
        try:
            return self.backend.encode_batch_fast([(text, pair)], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError("The text contains a lone surrogate, which is not a valid Unicode character.") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Ids without a token are dropped, and bytes that are not UTF-8 become U+FFFD."""
        ids = list(token_ids)
        if len(ids) <= _SHORT:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._token_to_bytes(token, token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A single token as text, including special tokens. An incomplete character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _token_to_bytes(self, token: str, token_id: int) -> bytes:
        if self._byte_rule == "byte_level":
            if all(char in _CHAR_TO_BYTE for char in token):
                return bytes(_CHAR_TO_BYTE[char] for char in token)
            return token.encode()
        if self._byte_rule == "byte_fallback":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()


class _OrdinaryEncoder:
    """Encodes texts of which some parts read like special tokens and are none.

    In a copy of the tokenizer, special tokens are ordinary text, and each has a mark, an added token that no text contains. The special
    tokens that are meant become their marks, so that the whole text is encoded at once, as always.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = [(token_id, token) for token_id, token in sorted(backend.get_added_tokens_decoder().items()) if token.special]
        nonce = secrets.token_hex(4)
        self._marks = {token.content: f"\ue000{nonce}{token_id}\ue001" for token_id, token in added}
        self._pattern = pattern_of(self._marks)
        self._backend = tokenizers.Tokenizer.from_str(_without_pieces(backend.to_str(), self._marks))
        self._backend.encode_special_tokens = True
        self._backend.add_tokens(
            [
                tokenizers.AddedToken(
                    self._marks[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                for _, token in added
            ]
        )
        ids = {self._backend.token_to_id(self._marks[token.content]): token_id for token_id, token in added}
        self._ids = {mark_id: token_id for mark_id, token_id in ids.items() if mark_id is not None}

    def encode(self, text: ChatText, add_special_tokens: bool) -> list[int]:
        marked = [self._pattern.sub(lambda match: self._marks[match[0]], before) + ordinary for before, ordinary in text.around_ordinary()]
        ids = _encode(self._backend, "".join(marked), add_special_tokens)
        return [self._ids.get(token_id, token_id) for token_id in ids]


def _without_pieces(state: str, texts: Mapping[str, str]) -> str:
    """A tokenizer.json whose model itself never makes the tokens `texts`, which a unigram model would do."""
    if '"Unigram"' not in state:
        return state
    parsed = json.loads(state)
    if parsed["model"]["type"] == "Unigram":
        parsed["model"]["vocab"] = [[piece, -1e9 if piece in texts else score] for piece, score in parsed["model"]["vocab"]]
    return json.dumps(parsed)


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) <= _SHORT:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except (UnicodeEncodeError, TypeError) as error:
        raise TokenizerError("The text contains a lone surrogate, which is not a valid Unicode character.") from error


def _byte_rule(backend: tokenizers.Tokenizer) -> str:
    """How a token becomes bytes: "byte_level", "byte_fallback", or "other" if only the decoder can tell."""
    if backend.decoder is None:
        return "other"
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return "byte_level"
    return "byte_fallback" if "ByteFallback" in kinds else "other"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other bytes for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_CHAR_TO_BYTE = _byte_alphabet()

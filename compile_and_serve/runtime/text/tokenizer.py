"""The tokenizer of a model: text ↔ token ids, end-of-sequence ids, the exact bytes of one token, the model's chat templates.

Backed by the `tokenizers` package on a tokenizer.json, on the metadata of a GGUF file (`runtime/text/gguf_tokenizer.py`), or on what
transformers makes of a folder that has neither. transformers itself is imported only in that last case.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The package releases the GIL only in its calls for batches, which cost more to begin: a text of so many characters, or ids,
# takes a millisecond of it at most.
_SHORT = 4096


class TokenizerError(ValueError):
    """The tokenizer cannot be loaded, or cannot encode this text; the message is one sentence for the user."""


class Tokenizer:
    """Text ↔ ids over one `tokenizers.Tokenizer`.

    special_tokens: name ("bos_token" …) → text. eos_token_ids: every id that ends a generation, the tokenizer's own first.
    chat_templates: name → jinja source; "default" is the usual one. source: what it was loaded from, for messages.
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
        """Whether a text's bytes are exactly its tokens' bytes in a row (GPT-2 family)."""
        return self._byte_rule == "byte_level"

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / max_token_chars tokens."""
        return max((len(token) for token in self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids. Lets other threads run meanwhile."""
        backend = self.backend
        try:
            if len(text) <= _SHORT:
                return backend.encode(text, add_special_tokens=add_special_tokens).ids
            return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError("The text holds a lone surrogate, which is no valid Unicode character.") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids without a token are left out, bytes that are no UTF-8 become U+FFFD."""
        ids = list(token_ids)
        if len(ids) <= _SHORT:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes which one token adds to a text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._token_to_bytes(token, token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special ones written out; half a character is U+FFFD."""
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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder or a .gguf file. Raises `TokenizerError` with one sentence when there is none."""
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path)
    if not path.is_dir():
        raise TokenizerError(f"The tokenizer '{path}' is neither a folder nor a .gguf file: give one of these.")
    if (path / "tokenizer.json").is_file():
        return _load_folder(path, _read_backend(path / "tokenizer.json"))
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _load_gguf(ggufs[0])
    return _load_folder(path, _convert_with_transformers(path))


def load_generation_defaults(path: str | Path) -> dict[str, float | int]:
    """The sampling fields of the model's generation_config.json, under the names of `SamplingParams`."""
    path = Path(path)
    config = _read_json(path / "generation_config.json") if path.is_dir() else {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: config[name] for name in names if isinstance(config.get(name), (int, float))}
    return {} if config.get("do_sample") is False else found


def _load_gguf(path: Path) -> Tokenizer:
    from compile_and_serve.runtime.text.gguf_tokenizer import tokenizer_from_gguf_metadata
    from compile_and_serve.runtime.weights.gguf import read_metadata

    return tokenizer_from_gguf_metadata(read_metadata(path), source=str(path))


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{file.name} cannot be read as a tokenizer ({error}): is the file complete?") from error


def _convert_with_transformers(path: Path) -> tokenizers.Tokenizer:
    wanted = "a tokenizer.json"
    if importlib.util.find_spec("transformers") is None:
        raise TokenizerError(
            f"No {wanted[2:]} in '{path}': add one, or install transformers, which can convert other kinds."
        )
    from transformers import AutoTokenizer

    logger.info("No tokenizer.json in %s: transformers converts what is there.", path)
    try:
        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # any of a dozen types, depending on which file is missing
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(
            f"No tokenizer in '{path}' ({wanted} is expected); transformers says: {first_line}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"The tokenizer in '{path}' has no fast form ({type(converted).__name__}): add {wanted}.")
    return backend


def _load_folder(path: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    _add_missing_tokens(backend, config)
    tokens = {**_read_json(path / "special_tokens_map.json"), **config}
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(tokens.get(name))) is not None}
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=_eos_ids(path),
        chat_templates=_folder_templates(path, config),
        source=str(path),
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    # Some folders list tokens in tokenizer_config.json alone; transformers adds them in the order of their ids.
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            flags = {
                k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry
            }
            token = tokenizers.AddedToken(entry["content"], **flags)
            (backend.add_special_tokens if entry.get("special") else backend.add_tokens)([token])


def _eos_ids(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if value is not None:
            return [int(v) for v in value] if isinstance(value, list) else [int(value)]
    return []


def _folder_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stored = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        found.update({entry["name"]: entry["template"] for entry in stored})
    legacy = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file.name} is not valid JSON ({error}): is the file complete?") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file.name} must hold a JSON object, it holds a {type(value).__name__}.")
    return value


def _byte_rule(backend: tokenizers.Tokenizer) -> str:
    """How one token turns into bytes: "byte_level", "byte_fallback" or "other" (only whole decoding tells)."""
    if backend.decoder is None:
        return "other"
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return "byte_level"
    return "byte_fallback" if "ByteFallback" in kinds else "other"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the rest for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_CHAR_TO_BYTE = _byte_alphabet()

"""Build a `Tokenizer` from the metadata of a GGUF file (keys `tokenizer.ggml.*`).

GGUF does not store the pre-tokenizer's regular expressions, only a name (`gguf_pre_tokenizers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from compile_and_serve.runtime.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from compile_and_serve.runtime.text.tokenizer import Tokenizer, TokenizerError

PREFIX = "tokenizer.ggml."
# Token types in `tokenizer.ggml.token_type`.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# Control tokens that end a generation, whatever the file's end token is: those that llama.cpp takes as ends.
END_TOKENS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|end_of_text|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS]
    <｜end▁of▁sentence｜> <end_of_utterance> <turn|> </s>
    """.split()
)
_HARMONY = {"<|return|>", "<|call|>"}  # with these, "<|end|>" ends a message and not the generation


def tokenizer_from_gguf_metadata(metadata: Mapping[str, Any], *, source: str = "") -> Tokenizer:
    """Build the tokenizer.

    metadata: GGUF key → value. source: the file, for messages. Raises `TokenizerError` for an unsupported type of
    tokenizer, and names the supported ones.
    """
    kind = metadata.get(PREFIX + "model")
    if kind is None:
        raise TokenizerError(f"The GGUF file holds no tokenizer ({PREFIX}model is missing): name another one with --tokenizer.")
    tokens = _array(metadata, "tokens", str)
    if not tokens:
        raise TokenizerError(f"The GGUF file is damaged: {PREFIX}tokens is empty; download it again.")
    types = _array(metadata, "token_type", int, length=len(tokens)) if PREFIX + "token_type" in metadata else []
    readers = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe, "t5": _unigram, "bert": _word_piece}
    if kind not in readers:
        raise TokenizerError(f"The GGUF tokenizer type {kind!r} is not supported, only {', '.join(readers)} are: use --tokenizer.")
    backend, adds_bos = readers[kind](metadata, tokens)
    adds_sep = bool(metadata.get(PREFIX + "add_sep_token", kind == "bert"))
    if adds_sep and kind != "bert":
        raise TokenizerError(f"The GGUF file sets {PREFIX}add_sep_token, which is not supported for {kind!r} tokenizers: use --tokenizer.")
    backend.add_special_tokens(_added(tokens, types, {CONTROL} if kind == "gpt2" else {CONTROL, UNKNOWN}, special=True))
    backend.add_tokens(_added(tokens, types, {USER_DEFINED}, special=False))
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "seperator"), ("mask", "mask")):
        token_id = _token_id(metadata, key, tokens)
        if token_id is not None:
            special[f"{name}_token"] = tokens[token_id]
    adds_eos = metadata.get(PREFIX + "add_eos_token", adds_sep or kind == "t5")
    _add_ends(
        backend,
        bos=special.get("bos_token") if metadata.get(PREFIX + "add_bos_token", adds_bos) else None,
        eos=special.get("sep_token" if adds_sep else "eos_token") if adds_eos else None,
    )
    return Tokenizer(
        backend, special_tokens=special, eos_token_ids=_end_ids(metadata, tokens, types), chat_templates=_templates(metadata), source=source
    )


def _array(metadata: Mapping[str, Any], name: str, kind: type, *, length: int | None = None) -> list[Any]:
    """An array of the metadata, checked. kind: of its items. Raises `TokenizerError`."""
    values = metadata.get(PREFIX + name)
    if values is None:
        raise TokenizerError(f"The GGUF file is damaged: {PREFIX}{name} is missing; name another tokenizer with --tokenizer.")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TokenizerError(f"The GGUF file is damaged: {PREFIX}{name} is not an array of type {kind.__name__}; download it again.")
    if length is not None and len(values) != length:
        raise TokenizerError(f"The GGUF file is damaged: {PREFIX}{name} has {len(values)} entries for {length} tokens; download it again.")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """The id of a special token; None if there is none. Files without that token hold an id outside the vocabulary."""
    value = metadata.get(f"{PREFIX}{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _model(**options: Any) -> Backend:
    try:
        return Backend(models.BPE(**options))
    except Exception as error:  # the library raises plain `Exception`, for a merge of unknown tokens for example
        raise TokenizerError(f"The GGUF file's tokenizer is damaged ({str(error)[:200]!r}): download it again.") from error


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    base = PREFIX.removesuffix("ggml.") + "chat_template"
    found = {key.removeprefix(base + "."): str(value) for key, value in metadata.items() if key.startswith(base + ".")}
    if base in metadata:
        found["default"] = str(metadata[base])
    return found


def _added(tokens: Sequence[str], types: Sequence[int], wanted: set[int], *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(t, special=special, normalized=False)
        for t, kind in zip(tokens, types, strict=False)  # without types, all tokens are normal
        if kind in wanted
    ]


def _end_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Ids that end a generation: of the file's keys (eos_token_ids is Ollama's), and of tokens that are known as ends by their text."""
    ids = [_token_id(metadata, key, tokens) for key in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    listed = _array(metadata, "eos_token_ids", int) if PREFIX + "eos_token_ids" in metadata else []
    kinds = types or [CONTROL] * len(tokens)
    known = {i: token for i, token in enumerate(tokens) if token in END_TOKENS and kinds[i] in (CONTROL, USER_DEFINED)}
    if set(known.values()) >= _HARMONY:
        known = {i: token for i, token in known.items() if token != "<|end|>"}
    return list(dict.fromkeys(one for one in (*ids, *listed, *known) if one is not None and 0 <= one < len(tokens)))


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    """A byte-level BPE (GPT-2 family), and whether a beginning-of-sequence token comes first by default."""
    name = str(metadata.get(PREFIX + "pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(f"The GGUF pre-tokenizer {name!r} is not supported, only {', '.join(PRE_TOKENIZERS)} are: use --tokenizer.")
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise TokenizerError(f"The GGUF file is damaged: {PREFIX}merges has an entry of one part; download it again.")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _model(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre.ignores_merges)
    if pre.is_composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _unigram(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    """SentencePiece's unigram model, with its table of characters that are replaced."""
    scores = _array(metadata, "scores", float, length=len(tokens))
    unknown = _token_id(metadata, "unknown", tokens)
    has_bytes = "<0x00>" in tokens
    backend = Backend(models.Unigram(list(zip(tokens, scores, strict=True)), unk_id=unknown or 0, byte_fallback=has_bytes))
    steps: list[normalizers.Normalizer] = []
    if PREFIX + "precompiled_charsmap" in metadata:
        steps.append(normalizers.Precompiled(bytes(value & 255 for value in _array(metadata, "precompiled_charsmap", int))))
    if metadata.get(PREFIX + "remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme: Literal["always", "never"] = "always" if metadata.get(PREFIX + "add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    ends = [decoders.ByteFallback(), decoders.Fuse()] if has_bytes else []
    backend.decoder = decoders.Sequence([*ends, decoders.Metaspace(prepend_scheme=scheme)])
    return backend, False


def _word_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    """BERT's WordPiece without case. The file marks the beginnings of words with "▁", where BERT marks what follows with "##"."""
    vocab = {_bert_spelling(token): i for i, token in enumerate(tokens)}
    unknown = _token_id(metadata, "unknown", tokens)
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]" if unknown is None else tokens[unknown]))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, True


def _bert_spelling(token: str) -> str:
    is_special = token.startswith("[") and token.endswith("]") and len(token) > 2
    return token.removeprefix("▁") if is_special or token.startswith("▁") else f"##{token}"


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    """SentencePiece's BPE. Merges follow from the scores; characters outside the vocabulary become bytes."""
    scores = _array(metadata, "scores", float, length=len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _model(
        vocab=vocab,
        merges=_merges_from_scores(vocab, scores),
        unk_token=tokens[_token_id(metadata, "unknown", tokens) or 0],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix_space = bool(metadata.get(PREFIX + "add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend, True


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Ranked merges. SentencePiece merges the pair with the highest score of the merged token; ties go by the parts' ids."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(ranked)]


def _add_ends(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    if bos is None and eos is None:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(t for t in (bos, eos) if t)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)

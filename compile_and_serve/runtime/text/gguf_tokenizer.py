"""Build a `Tokenizer` from the metadata of a GGUF file (keys `tokenizer.ggml.*`).

GGUF does not store the pre-tokenizer's regular expressions, only a name in `tokenizer.ggml.pre`. The patterns here are
those that the models publish in their tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from compile_and_serve.runtime.text.tokenizer import Tokenizer, TokenizerError

PREFIX = "tokenizer.ggml."
# Token types in `tokenizer.ggml.token_type`.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_LETTERS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_QWEN2 = _LETTERS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_GPT2 = ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez")


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
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata, tokens), True
    else:
        raise TokenizerError(f"The GGUF tokenizer type '{kind}' is not supported, only 'gpt2' and 'llama' are: use --tokenizer.")
    backend.add_special_tokens(_added(tokens, types, {CONTROL, UNKNOWN} if kind == "llama" else {CONTROL}, special=True))
    backend.add_tokens(_added(tokens, types, {USER_DEFINED}, special=False))
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("sep", "separator")):
        token_id = _token_id(metadata, key, tokens)
        if token_id is not None:
            special[f"{name}_token"] = tokens[token_id]
    _add_ends(
        backend,
        bos=special.get("bos_token") if metadata.get(PREFIX + "add_bos_token", adds_bos) else None,
        eos=special.get("eos_token") if metadata.get(PREFIX + "add_eos_token", False) else None,
    )
    ends = [_token_id(metadata, key, tokens) for key in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        special_tokens=special,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        chat_templates=_templates(metadata),
        source=source,
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


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    """A byte-level BPE (GPT-2 family), and whether a beginning-of-sequence token comes first by default."""
    pre = str(metadata.get(PREFIX + "pre", "default"))
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise TokenizerError(f"The GGUF file is damaged: {PREFIX}merges has an entry of one part; download it again.")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _model(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre in _LLAMA3)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        backend.pre_tokenizer = plain
    elif pre in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre in _LLAMA3:
        backend.pre_tokenizer = _split(_LETTERS_LLAMA3)
    elif pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _split(_LETTERS_QWEN2)
    else:
        known = ", ".join([*_GPT2, *_DIGITS, *_LLAMA3, *_QWEN2])
        raise TokenizerError(f"The GGUF pre-tokenizer '{pre}' is not supported, only {known} are: use --tokenizer.")
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _LLAMA3


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    behavior: Literal["isolated"] = "isolated"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior), byte_level])


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
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
    return backend


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

"""Pre-tokenizers by their names in GGUF files (`tokenizer.ggml.pre`), which hold no regular expressions.

The patterns are those that the models publish in their tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\\p{{N}}{_AFTER_WORDS}"
_GPT_4O = f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}|\\p{{N}}{{1,3}}{_AFTER_WORDS}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"

Digits = Literal["", "individual", "together", "threes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """How text is cut before it is merged.

    patterns: each cuts what the ones before left. digits: how they are kept apart. splits_words: then GPT-2's own pattern cuts.
    punctuation: runs of it are kept apart first. is_composed: text is put into Unicode's form NFC before.
    ignores_merges: a whole piece that is a token is taken without merges. adds_bos: a beginning-of-sequence token comes first by default.
    """

    patterns: tuple[str, ...] = ()
    digits: Digits = ""
    splits_words: bool = False
    punctuation: bool = False
    is_composed: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.punctuation:
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        if self.digits == "individual":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.splits_words))
        if self.digits in ("together", "threes"):
            steps.append(pre_tokenizers.Digits(individual_digits=False))
        if self.digits == "threes":
            steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default gpt-2 gpt2 mpt olmo jais phi-2", PreTokenizer(splits_words=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b", PreTokenizer(digits="individual", splits_words=True)),
    ("command-r", PreTokenizer(digits="individual", splits_words=True, is_composed=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral dbrx smaug-bpe",
        PreTokenizer(patterns=(_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("chatglm-bpe glm4", PreTokenizer(patterns=(_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez", PreTokenizer(patterns=(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), is_composed=True)),
    ("tekken", PreTokenizer(patterns=(_TEKKEN,), ignores_merges=True, adds_bos=True)),
    ("gpt-4o", PreTokenizer(patterns=(_GPT_4O,), ignores_merges=True)),
    ("deepseek-v3", PreTokenizer(patterns=_DEEPSEEK_V3)),
    ("deepseek-coder", PreTokenizer(patterns=_DEEPSEEK_CODER)),
    ("falcon", PreTokenizer(punctuation=True, splits_words=True, digits="threes")),
    ("bloom gpt3-finnish", PreTokenizer(patterns=(_BLOOM,))),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: made for names, made in _ROWS for name in names.split()}

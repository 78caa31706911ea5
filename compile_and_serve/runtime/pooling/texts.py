"""Token ids of texts and pairs for models that read whole prompts. What is cut off never takes a special token with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import tokenizers

from compile_and_serve.custom_ops.step_data import SECOND_TEXT
from compile_and_serve.runtime.messages import StepData
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.special_text import ChatText
from compile_and_serve.runtime.text.tokenizer import TokenizerError

PAIR_PARTS = re.compile(r"(\{query\}|\{document\})")
_LONG_TEXT = 1 << 16  # characters; a longer text is cut before it is tokenized


Texts = Sequence[tuple[str, str | None]]  # each with the second text of a pair, or alone


def encode_texts(
    inputs: InputProcessor, texts: Texts, *, add_special_tokens: bool, truncate: int | None, truncation_side: Literal["left", "right"]
) -> list[tuple[list[int], StepData]]:
    """Token ids of each text, or of two that the tokenizer joins as the model expects, and where the second one begins.

    All are tokenized at once, on the tokenizer's threads, while other Python threads run. truncate: tokens to keep, special ones included;
    -1: as many as the model takes. Of a pair, the longer text is cut first. Raises `TokenizerError` for invalid text, and
    `PromptTooLongError` before it tokenizes one that cannot fit.
    """
    backend = inputs.require_tokenizer("a text prompt").backend
    if truncate is not None and truncate < 0:
        truncate = inputs.limit
    given: list[str] = []
    for text, pair in texts:
        parts = [text] if pair is None else [text, pair]
        if truncate is None:
            inputs.check_length(sum(map(len, parts)))
            given += parts
        else:
            size = max(_LONG_TEXT, 16 * truncate)
            given += [one[:size] if truncation_side == "right" else one[-size:] for one in parts]
    try:
        encoded = iter(backend.encode_batch(given, add_special_tokens=False))
    except (UnicodeEncodeError, TypeError) as error:
        raise TokenizerError("The text contains a lone surrogate, which is not a valid Unicode character.") from error
    found: list[tuple[list[int], StepData]] = []
    for _, pair in texts:
        parts_of_one = [next(encoded) for _ in range(1 if pair is None else 2)]
        if truncate is not None:
            specials = backend.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
            _cut(parts_of_one, max(truncate - specials, 0), truncation_side)
        joined = backend.post_process(parts_of_one[0], None if pair is None else parts_of_one[1], add_special_tokens)
        types = joined.type_ids if pair is not None else []
        found.append((joined.ids, {SECOND_TEXT: types.index(1)} if 1 in types else {}))
    return found


def _cut(encoded: list[tokenizers.Encoding], room: int, side: Literal["left", "right"]) -> None:
    """Cut the longer text until all fit in `room` tokens."""
    if sum(map(len, encoded)) <= room:
        return
    keep = [room] if len(encoded) == 1 else _shares(len(encoded[0]), len(encoded[1]), room)
    for one, count in zip(encoded, keep, strict=True):
        if len(one) > count:
            one.truncate(count, direction=side)


def _shares(first: int, second: int, room: int) -> list[int]:
    """Tokens that two texts keep if one after another is taken from the longer one."""
    shorter = min(first, second, room // 2)
    if first <= second:
        return [shorter, room - shorter]
    return [room - shorter, shorter]


def joined(template: str, query: str, document: str) -> ChatText:
    """The prompt of a pair. What reads like a special token in the two texts is none."""
    text, ordinary = "", []
    for part in PAIR_PARTS.split(template):
        given = {"{query}": query, "{document}": document}.get(part)
        if given:
            ordinary.append((len(text), len(text) + len(given)))
        text += part if given is None else given
    return ChatText(text, ordinary)

"""Token ids of texts and pairs for models that read whole prompts. What is cut off never takes a special token with it."""

from __future__ import annotations

from typing import Literal

import tokenizers

from compile_and_serve.custom_ops.step_data import SECOND_TEXT
from compile_and_serve.runtime.messages import StepData
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.tokenizer import TokenizerError

_LONG_TEXT = 1 << 16  # characters; a longer text is cut before it is tokenized


def encode_texts(
    inputs: InputProcessor,
    text: str,
    pair: str | None,
    *,
    add_special_tokens: bool,
    truncate: int | None,
    truncation_side: Literal["left", "right"],
) -> tuple[list[int], StepData]:
    """Token ids of a text, or of two that the tokenizer joins as the model expects, and where the second one begins.

    truncate: tokens to keep, special ones included; -1: as many as the model takes. Of a pair, the longer text is cut first.
    Raises `TokenizerError` for invalid text, and `PromptTooLongError` before it tokenizes one that cannot fit.
    """
    backend = inputs.require_tokenizer("a text prompt").backend
    texts = [text] if pair is None else [text, pair]
    if truncate is None:
        inputs.check_length(sum(map(len, texts)))
    else:
        truncate = inputs.limit if truncate < 0 else truncate
        size = max(_LONG_TEXT, 16 * truncate)
        texts = [one[:size] if truncation_side == "right" else one[-size:] for one in texts]
    try:
        encoded = backend.encode_batch(texts, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError) as error:
        raise TokenizerError("The text contains a lone surrogate, which is not a valid Unicode character.") from error
    if truncate is not None:
        specials = backend.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
        _cut(encoded, max(truncate - specials, 0), truncation_side)
    joined = backend.post_process(encoded[0], encoded[1] if pair is not None else None, add_special_tokens)
    types = joined.type_ids
    return joined.ids, {SECOND_TEXT: types.index(1)} if 1 in types else {}


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

"""Incremental detokenization against whole decoding, and stop strings against a search in the whole text."""

from __future__ import annotations

import random

import pytest

from compile_and_serve.runtime.text.detokenizer import TextStream, make_detokenizer
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

TEXTS = [
    "Hello, world!",
    "naïve café — “quotes” … Ω ≈ ∞",
    "日本語のテキストと中文字符以及한국어",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 mixed 𝔘𝔫𝔦 text",
    "  leading and   many    spaces\n\n\ttabs",
    "a" * 40 + "é" * 40,
]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_level_tokenizer(TEXTS) if request.param == "byte_level" else sentencepiece_tokenizer(TEXTS)


def deltas_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def test_deltas_of_valid_text_are_whole_characters_and_add_up(tokenizer: Tokenizer) -> None:
    generator = random.Random(99)
    randoms = ["".join(generator.choices("abc é語🙂 \n▁x", k=generator.randrange(1, 30))) for _ in range(200)]
    for text in TEXTS + randoms:
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas = deltas_of(tokenizer, ids)
        assert "".join(deltas) == tokenizer.decode(ids)
        if text in TEXTS:
            assert tokenizer.decode(ids) == text
            assert not any("\ufffd" in delta for delta in deltas)


def test_byte_by_byte_emoji_comes_out_once_and_whole() -> None:
    tokenizer = byte_level_tokenizer(["plain"])
    ids = tokenizer.encode("🙂é", add_special_tokens=False)
    assert len(ids) == 6
    assert deltas_of(tokenizer, ids) == ["", "", "", "🙂", "", "é", ""]
    assert deltas_of(tokenizer, ids[:3]) == ["", "", "", "\ufffd"]


def test_sentencepiece_bytes_wait_for_their_character() -> None:
    tokenizer = sentencepiece_tokenizer(["plain text"])
    ids = tokenizer.encode("plain🙂", add_special_tokens=False)
    deltas = deltas_of(tokenizer, ids)
    assert deltas[-5:-1] == ["", "", "", "🙂"]


def test_space_at_the_beginning_of_a_continuation_is_kept() -> None:
    tokenizer = sentencepiece_tokenizer(["one", "two"])
    prompt, rest = tokenizer.encode("one"), tokenizer.encode("one two three")
    assert rest[: len(prompt)] == prompt
    assert "".join(deltas_of(tokenizer, rest[len(prompt) :], prompt=prompt)) == " two three"


@pytest.mark.parametrize("num_of_prompt", [0, 1, 2, 3, 4])
def test_a_character_that_begins_in_the_prompt_loses_no_text(num_of_prompt: int) -> None:
    tokenizer = sentencepiece_tokenizer(["one", "two"])
    ids = tokenizer.encode("one🙂 two three", add_special_tokens=False)
    first = ids.index(tokenizer.backend.token_to_id("<0xF0>"))
    prompt, rest = ids[: first + num_of_prompt], ids[first + num_of_prompt :]
    deltas = deltas_of(tokenizer, rest, prompt=prompt)
    assert "".join(deltas) == ("" if num_of_prompt == 4 else "🙂") + " two three"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a", add_special_tokens=False), tokenizer.backend.token_to_id("<|end|>")]
    assert "<|end|>" not in "".join(deltas_of(tokenizer, ids, skip=True))
    assert "".join(deltas_of(tokenizer, ids, skip=False)).endswith("<|end|>")


def test_random_tokens_decode_as_in_one_call() -> None:
    tokenizer = byte_level_tokenizer(TEXTS)
    generator = random.Random(1234)
    for _ in range(200):
        ids = [generator.randrange(tokenizer.vocab_size + 3) for _ in range(generator.randrange(1, 40))]
        for skip in (True, False):
            assert "".join(deltas_of(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_bytes_that_form_no_character_are_held_back_only_briefly() -> None:
    tokenizer = sentencepiece_tokenizer(["x"])
    lead = tokenizer.backend.token_to_id("<0xE4>")
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=True)
    waiting = longest = 0
    for _ in range(50):
        waiting = 0 if detokenizer.push(lead) else waiting + 1
        longest = max(longest, waiting)
    assert longest <= 8


def stream_all(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[str, str | None, list[str]]:
    stream = TextStream(make_detokenizer(tokenizer, [], skip_special_tokens=True), **options)  # type: ignore[arg-type]
    deltas = []
    for token_id in ids:
        deltas.append(stream.push(token_id))
        if stream.stopped_by is not None:
            return "".join(deltas), stream.stopped_by, deltas
    deltas.append(stream.finish())
    return "".join(deltas), stream.stopped_by, deltas


def reference_stop(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_where_a_plain_search_does(include: bool) -> None:
    tokenizer = byte_level_tokenizer(["abab ba é語"])
    generator = random.Random(7)
    stopped = 0
    for _ in range(400):
        text = "".join(generator.choice("ab é語") for _ in range(generator.randrange(1, 25)))
        stop = ["".join(generator.choice("ab é語") for _ in range(generator.randrange(2, 5))) for _ in range(3)]
        ids = tokenizer.encode(text, add_special_tokens=False)
        got, reason, deltas = stream_all(tokenizer, ids, stop=stop, include_stop=include)
        assert (got, reason) == reference_stop(text, stop, include), (text, stop, deltas)
        stopped += reason is not None
    assert 50 < stopped < 390


@pytest.mark.parametrize("include", [False, True])
def test_of_two_stop_strings_in_one_token_the_earliest_end_wins(include: bool) -> None:
    tokenizer = byte_level_tokenizer(["abcdef " * 50])
    [_, token_id] = tokenizer.encode(" abcdef abcdef", add_special_tokens=False)
    assert tokenizer.decode([token_id]) == " abcdef"
    for stop, cut in (
        (["def", "bc"], "bc"),  # bc ends first, and comes later in the list
        (["abcde", "bcd"], "bcd"),  # abcde begins first
        (["ef", "cdef", "f"], "cdef"),  # of equal ends the longest
        (["zz", "f", "a"], "a"),
    ):
        text, reason, _ = stream_all(tokenizer, [token_id, token_id], stop=stop, include_stop=include)
        end = " abcdef".index(cut) + (len(cut) if include else 0)
        assert (text, reason) == (" abcdef"[:end], cut)


def test_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    tokenizer = byte_level_tokenizer([])
    ids = tokenizer.encode("xENOUGH", add_special_tokens=False)
    _, reason, deltas = stream_all(tokenizer, ids, stop=["END"])
    assert reason is None
    assert deltas == ["x", "", "", "ENO", "U", "G", "H", ""]


def test_stop_string_within_min_tokens_is_ignored() -> None:
    tokenizer = byte_level_tokenizer([])
    ids = tokenizer.encode("aSbSc", add_special_tokens=False)
    text, reason, _ = stream_all(tokenizer, ids, stop=["S"], min_tokens=2)
    assert (text, reason) == ("aSb", "S")

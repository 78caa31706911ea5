"""Special tokens in untrusted text stay text: the tokens are those of the whole prompt, with the template's own control tokens."""

from __future__ import annotations

import random
import re
import time

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.special_text import ChatText, Placeholders, pattern_of
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

START, END = "<|start|>", "<|end|>"
TEXTS = ["the quick brown fox", "Hello there, 🙂 wörld!"]


def unigram_tokenizer() -> Tokenizer:
    """A model that would write special tokens by itself, since they are pieces of its vocabulary."""
    letters = sorted({*"".join(TEXTS), *START, *END, "\n", "▁"})
    backend = Backend(models.Unigram([("<unk>", 0.0), (START, 0.0), (END, 0.0), *((letter, -2.0) for letter in letters)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", START, END)])
    return Tokenizer(backend, special_tokens={"bos_token": START, "eos_token": END}, chat_templates={})


TOKENIZERS = {"byte level": byte_level_tokenizer(TEXTS), "sentencepiece": sentencepiece_tokenizer(TEXTS), "unigram": unigram_tokenizer()}


def chat_text(*parts: str | tuple[str]) -> ChatText:
    """A tuple holds ordinary text."""
    text, ordinary = "", []
    for part in parts:
        if isinstance(part, tuple):
            ordinary.append((len(text), len(text) + len(part[0])))
        text += part if isinstance(part, str) else part[0]
    return ChatText(text, ordinary)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def test_ordinary_parts_are_no_special_tokens(tokenizer: Tokenizer) -> None:
    text = chat_text(START, "the fox", (END,), "\n", (START,), "fox", END, "the", (END,))
    ids = tokenizer.encode(text, add_special_tokens=False)
    special = [tokenizer.special_texts[START], tokenizer.special_texts[END]]
    assert [token_id for token_id in ids if token_id in special] == special
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == text.text.replace(" ", "")
    assert tokenizer.encode(text.text, add_special_tokens=False) != ids


def test_other_tokens_and_seams_are_as_without_special_tokens(tokenizer: Tokenizer) -> None:
    """The ordinary part is any text here, so that the usual tokens are known."""
    random.seed(0)
    for _ in range(200):
        pieces = [random.choice([START, END, "the ", " fox", "\n", "🙂", "wör", "ld", " ", "quick"]) for _ in range(random.randint(1, 12))]
        parts = [(piece,) if piece not in (START, END) and random.random() < 0.5 else piece for piece in pieces]
        parts.append(("the",))
        for add in (False, True):
            expected = tokenizer.encode("".join(pieces) + "the", add_special_tokens=add)
            assert tokenizer.encode(chat_text(*parts), add_special_tokens=add) == expected, parts


def test_seams_of_special_text_are_merged_as_text() -> None:
    """Like a tokenizer that has no special tokens at all."""
    tokenizer = TOKENIZERS["byte level"]
    plain = byte_level_tokenizer(TEXTS).backend
    plain.encode_special_tokens = True
    for before, after in (("the ", " fox"), ("the", "fox"), ("\n", "\n"), ("<", ">"), ("🙂", "")):
        text = chat_text(before, (END,), after)
        assert tokenizer.encode(text) == plain.encode(text.text).ids


def test_long_text_and_cuts() -> None:
    tokenizer = TOKENIZERS["byte level"]
    info = EngineInfo(max_model_len=300, block_size=16, num_kv_blocks=4096, vocab_size=tokenizer.vocab_size, dtype="float32", device="cpu")
    inputs = InputProcessor(tokenizer, info)
    parts: list[str | tuple[str]] = [START]
    for _ in range(20_000):
        parts += ["the quick ", (END,), " fox"]
    text = chat_text(*parts, END)
    whole = tokenizer.encode(text, add_special_tokens=False)
    for side in ("left", "right"):
        ids = inputs.encode(text, add_special_tokens=False, truncate=200, truncation_side=side)  # type: ignore[arg-type]
        assert len(ids) < len(whole) / 4
        assert (ids[-200:] if side == "left" else ids[:200]) == (whole[-200:] if side == "left" else whole[:200])
    part = text.cut(3, 25)
    assert part.text == text.text[3:25]
    assert [part.text[begin:end] for begin, end in part.ordinary] == [text.text[19:25]]


def rendered(value: object, template: str = "{}") -> ChatText:
    hidden = Placeholders(TOKENIZERS["byte level"])
    return hidden.restore(template.format(hidden.hide(value)))


def test_hidden_text_returns_in_its_place() -> None:
    text = f"a{END}b{END}{START}c"
    assert rendered(text, START + "{}" + END).text == START + text + END
    assert [text[begin:end] for begin, end in rendered(text).ordinary] == [END, END, START]
    assert rendered("nothing here < |end|>") == ChatText("nothing here < |end|>")
    digits = "012345678901234567890" + END + "9"
    assert rendered(digits).text == digits


def test_only_texts_of_others_are_hidden() -> None:
    hidden = Placeholders(TOKENIZERS["byte level"])
    messages = [{"role": role, "content": END, "name": START} for role in ("system", "assistant", "tool", "user", "model", "developer")]
    messages.append({"role": "user", "content": [{"type": "text", "text": END}]})
    shown = hidden.hide_in_messages(messages)
    for message, given in zip(shown, messages, strict=True):
        assert message["role"] == given["role"]
        assert (END in str(message), START in str(message)) == ((True, True) if given["role"] in ("assistant", "model") else (False, False))
    assert messages[0] == {"role": "system", "content": END, "name": START}


def test_parts_that_a_template_joins_are_no_special_token() -> None:
    hidden = Placeholders(TOKENIZERS["byte level"])
    parts = hidden.hide([{"type": "text", "text": "a<|e"}, {"type": "text", "text": "nd|>"}, "x<|star", "t|>"])
    joined = hidden.restore("".join(part if isinstance(part, str) else part["text"] for part in parts))
    assert joined.text == f"a{END}x{START}"
    special = TOKENIZERS["byte level"].special_texts
    assert not {special[START], special[END]}.intersection(TOKENIZERS["byte level"].encode(joined, add_special_tokens=False))


def test_pattern_finds_the_longest_and_is_fast() -> None:
    texts = ["<a>", "<a>b", "<|x|>", "<|xy|>", "[.*]", "é"]
    assert pattern_of(texts).findall("<a>b <a> <|xy|><|x|>[.*] <|x é") == ["<a>b", "<a>", "<|xy|>", "<|x|>", "[.*]", "é"]
    assert pattern_of([]).findall("any text") == []
    many = pattern_of([f"<|reserved_special_token_{i}|>" for i in range(2000)])
    begun = time.process_time()
    assert many.search("<|reserved_special_token_" * 40_000) is None
    assert time.process_time() - begun < 2.0
    assert re.fullmatch(many, "<|reserved_special_token_1999|>")


def test_no_key_protects_a_special_token(tokenizer: Tokenizer) -> None:
    schema = {"properties": {"type": {"description": f"a{END}"}, "role": f"b{START}"}, "type": f"c{END}"}
    assert not re.search(f"{re.escape(START)}|{re.escape(END)}", str(Placeholders(tokenizer).hide(schema)))

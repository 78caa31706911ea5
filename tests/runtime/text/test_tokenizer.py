"""Tokenizers from folders and GGUF metadata, against transformers as the reference."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from compile_and_serve.runtime.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from compile_and_serve.runtime.text.gguf_tokenizer import tokenizer_from_gguf_metadata
from compile_and_serve.runtime.text.load_tokenizer import load_generation_defaults, load_tokenizer
from compile_and_serve.runtime.text.tokenizer import Tokenizer, TokenizerError
from tests.support.tokenizers import TEMPLATE, byte_level_tokenizer, sentencepiece_tokenizer

TEXTS = [
    "Hello world 123 4567",
    "  lead\n\n\ttabs  and   spaces ",
    "日本語のテキスト 🙂👩‍👩‍👧‍👦 é ñ",
    "<|im_start|>user\nhi<|im_end|>",
    "a\u0301 ﷺ \x00 \u200b",
    "def f(x):\n    return x**2  # 10,000.5\n",
    "",
]


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps({**defaults, **config}))
    return folder


@pytest.mark.slow
def test_smollm2_folder_and_gguf_agree_with_transformers(smollm2_dir: Path, smollm2_gguf: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_dir)
    for tokenizer in (load_tokenizer(smollm2_dir), load_tokenizer(smollm2_gguf)):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == reference.encode(text)
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
            assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == text
        assert tokenizer.eos_token_ids[0] == reference.eos_token_id
        assert {tokenizer.backend.id_to_token(one) for one in tokenizer.eos_token_ids} <= {"<|im_end|>", "<|endoftext|>"}
        assert tokenizer.special_tokens["bos_token"] == reference.bos_token
        assert tokenizer.chat_templates["default"] == reference.chat_template
        assert tokenizer.vocab_size == len(reference)


def test_end_ids_are_those_of_the_tokenizer_and_the_generation_config(tmp_path: Path) -> None:
    folder = save(byte_level_tokenizer([]), tmp_path)
    own = byte_level_tokenizer([]).eos_token_ids[0]
    assert load_tokenizer(folder).eos_token_ids == [own]
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(folder).eos_token_ids == [own, 7]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [9, {own}, 11], "temperature": 0.6, "top_k": 20}}')
    assert load_tokenizer(folder).eos_token_ids == [own, 9, 11]
    assert load_generation_defaults(folder) == {"temperature": 0.6, "top_k": 20}


def test_templates_are_found_in_all_files(tmp_path: Path) -> None:
    folder = save(
        byte_level_tokenizer([]), tmp_path, chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
    )
    assert load_tokenizer(folder).chat_templates == {"default": "A", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("B")
    assert load_tokenizer(folder).chat_templates["default"] == "B"


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer([])
    extra = {str(tokenizer.vocab_size): {"content": "<|tool|>", "special": True, "normalized": False}}
    loaded = load_tokenizer(save(tokenizer, tmp_path, added_tokens_decoder=extra))
    assert loaded.encode("<|tool|>") == [tokenizer.vocab_size]
    assert tokenizer.vocab_size in loaded.special_ids


def test_truncation_stored_in_the_file_is_turned_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer([])
    tokenizer.backend.enable_truncation(3)
    tokenizer.backend.enable_padding(length=64)
    loaded = load_tokenizer(save(tokenizer, tmp_path))
    assert len(loaded.encode("abcdefgh")) == 8


@pytest.mark.parametrize("name,content", [("tokenizer.json", "{"), ("tokenizer.json", '{"version": 1}'), ("tokenizer_config.json", "[]")])
def test_the_error_names_a_damaged_file(tmp_path: Path, name: str, content: str) -> None:
    folder = save(byte_level_tokenizer([]), tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        load_tokenizer(folder)


def test_the_error_of_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="neither a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_another_tokenizer_format_is_converted_by_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = byte_level_tokenizer(TEXTS)
    original.backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with caplog.at_level("INFO", logger="compile_and_serve.runtime.text.load_tokenizer"):
        loaded = load_tokenizer(tmp_path)
    assert "transformers converts the tokenizer" in caplog.text
    assert loaded.encode(TEXTS[0]) == original.encode(TEXTS[0])
    assert loaded.eos_token_ids == original.eos_token_ids


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        byte_level_tokenizer([]).encode("\ud800")


def test_loading_a_folder_does_not_import_transformers_or_torch(tmp_path: Path) -> None:
    folder = save(byte_level_tokenizer([]), tmp_path)
    code = (
        "import sys; from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer; "
        f"load_tokenizer({str(folder)!r}); print('transformers' in sys.modules, 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def gguf_metadata(tokenizer: Tokenizer, *, kind: str, **more: Any) -> dict[str, Any]:
    state = json.loads(tokenizer.backend.to_str())
    vocabulary = sorted(tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    special = {token["id"] for token in state["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    rank = {merge.replace(" ", "", 1): -float(i) for i, merge in reversed(list(enumerate(merges)))}
    metadata = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for _, i in vocabulary],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": [rank.get(token, -1e9) for token, _ in vocabulary],
        "tokenizer.ggml.bos_token_id": tokenizer.backend.token_to_id("<|start|>"),
        "tokenizer.ggml.eos_token_id": tokenizer.backend.token_to_id("<|end|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    return {**metadata, **more}


def test_gguf_byte_level_equals_the_original_tokenizer() -> None:
    original = byte_level_tokenizer(TEXTS)
    loaded = tokenizer_from_gguf_metadata(gguf_metadata(original, kind="gpt2"))
    for text in TEXTS:
        assert loaded.encode(text) == original.encode(text)
    assert loaded.eos_token_ids == original.eos_token_ids
    assert loaded.chat_templates == {"default": TEMPLATE}
    assert loaded.special_ids == original.special_ids


def test_gguf_sentencepiece_equals_the_original_tokenizer() -> None:
    original = sentencepiece_tokenizer(["the quick brown fox", "the other fox", "é 語"])
    metadata = gguf_metadata(original, kind="llama")
    loaded = tokenizer_from_gguf_metadata(metadata)
    bos = original.backend.token_to_id("<|start|>")
    for text in ["the quick fox", "é 語 🙂 unknown", " spaced"]:
        assert loaded.encode(text) == [bos, *original.encode(text)]
        assert loaded.encode(text, add_special_tokens=False) == original.encode(text)
        assert loaded.decode(original.encode(text)) == text
    without = tokenizer_from_gguf_metadata({**metadata, "tokenizer.ggml.add_bos_token": False})
    assert without.encode("the") == original.encode("the")


@pytest.mark.parametrize(
    "pre,pieces",
    [
        ("smollm", "a|1|2|3|4"),
        ("command-r", "a|1|2|3|4"),
        ("qwen2", "a|1|2|3|4"),
        ("tekken", "a|1|2|3|4"),
        ("deepseek-coder", "a|1|2|3|4"),
        ("llama-bpe", "a|123|4"),
        ("gpt-4o", "a|123|4"),
        ("deepseek-v3", "a|123|4"),
        ("chatglm-bpe", "a|123|4"),
        ("falcon", "a|123|4"),
        ("gpt-2", "a|1234"),
        ("bloom", "a1|234"),
    ],
)
def test_gguf_pre_tokenizers_split_digits_as_named(pre: str, pieces: str) -> None:
    """The vocabulary merges any digits of the text, also with the letter, unless the pre-tokenizer keeps them apart."""
    metadata = gguf_metadata(byte_level_tokenizer([]), kind="gpt2", **{"tokenizer.ggml.pre": pre})
    merges = ["1 2", "12 3", "123 4", "3 4", "a 1", "a1 2"] if pre != "bloom" else ["a 1", "2 3", "23 4"]
    added = [merge.replace(" ", "") for merge in merges]
    metadata["tokenizer.ggml.tokens"] += added
    metadata["tokenizer.ggml.token_type"] += [1] * len(added)
    metadata["tokenizer.ggml.merges"] += merges
    loaded = tokenizer_from_gguf_metadata(metadata)
    ids = loaded.encode("a1234", add_special_tokens=False)
    assert [loaded.decode([token_id]) for token_id in ids] == pieces.split("|")


@pytest.mark.parametrize(
    "kind,key,value,says",
    [
        ("gpt2", "tokens", None, "tokens is missing"),
        ("gpt2", "tokens", [], "tokens is empty"),
        ("gpt2", "tokens", 7, "tokens is not an array of type str"),
        ("gpt2", "tokens", [1, 2], "tokens is not an array of type str"),
        ("gpt2", "token_type", [1], "token_type has 1 entries for"),
        ("gpt2", "merges", None, "merges is missing"),
        ("gpt2", "merges", ["ab"], "entry of one part"),
        ("gpt2", "merges", ["a never-heard-of"], "tokenizer is damaged .*never-heard-of"),
        ("llama", "scores", None, "scores is missing"),
        ("llama", "scores", [0.5], "scores has 1 entries for"),
    ],
)
def test_damaged_gguf_tokenizers_are_one_sentence(kind: str, key: str, value: Any, says: str) -> None:
    metadata = gguf_metadata(byte_level_tokenizer([]), kind=kind, **{f"tokenizer.ggml.{key}": value})
    with pytest.raises(TokenizerError, match=says) as error:
        tokenizer_from_gguf_metadata(metadata)
    assert "\n" not in str(error.value)


def test_special_tokens_outside_a_gguf_vocabulary_are_none() -> None:
    metadata = gguf_metadata(byte_level_tokenizer([]), kind="gpt2")
    metadata |= {f"tokenizer.ggml.{name}_token_id": 10**6 for name in ("eos", "eot")}
    loaded = tokenizer_from_gguf_metadata(metadata)
    assert loaded.eos_token_ids == [loaded.backend.token_to_id("<|end|>")]  # by its text


@pytest.mark.parametrize(
    "key,value,says",
    [
        ("tokenizer.ggml.model", "rwkv", "only gpt2, llama, t5, bert are"),
        ("tokenizer.ggml.add_sep_token", True, "add_sep_token"),
        ("tokenizer.ggml.pre", "martian", "smollm"),
        ("tokenizer.ggml.model", None, "no tokenizer"),
    ],
)
def test_unknown_gguf_kinds_name_the_supported_ones(key: str, value: Any, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        tokenizer_from_gguf_metadata(gguf_metadata(byte_level_tokenizer([]), kind="gpt2", **{key: value}))


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = byte_level_tokenizer([])
    text = "word " * 20_000
    encoding, ran = threading.Event(), threading.Event()

    def run() -> None:
        encoding.wait()
        ran.set()

    other = threading.Thread(target=run)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # now another thread runs only when this one releases the GIL
    try:
        encoding.set()
        for _ in range(100):
            ids = tokenizer.encode(text)
            ran_meanwhile = ran.is_set()
            if ran_meanwhile:
                break
    finally:
        sys.setswitchinterval(interval)
    other.join()
    assert ran_meanwhile
    assert tokenizer.decode(ids) == text


def test_long_texts_and_ids_give_the_same_as_short_ones() -> None:
    for tokenizer in (byte_level_tokenizer(TEXTS), sentencepiece_tokenizer(TEXTS)):
        for text in TEXTS:
            long = "<|end|>" + text * 1000
            assert tokenizer.encode(long) == tokenizer.backend.encode(long).ids
            ids = tokenizer.encode(text) * 1000
            for skip in (True, False):
                whole = tokenizer.backend.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == whole
    with pytest.raises(TokenizerError, match="surrogate"):
        byte_level_tokenizer([]).encode("\ud800" * 5000)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_gguf_pre_tokenizer_keeps_the_text(pre: str) -> None:
    loaded = tokenizer_from_gguf_metadata(gguf_metadata(byte_level_tokenizer(TEXTS), kind="gpt2", **{"tokenizer.ggml.pre": pre}))
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].is_composed else text
        assert loaded.decode(loaded.encode(text, add_special_tokens=False), skip_special_tokens=False) == expected


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"])
@pytest.mark.parametrize("kind", [3, 4])
def test_control_tokens_that_end_turns_end_a_gguf_generation(end: str, kind: int) -> None:
    metadata = with_tokens({end: kind})
    assert tokenizer_from_gguf_metadata(metadata).eos_token_ids == [EOS, COUNT]


def test_ordinary_tokens_of_such_a_text_do_not() -> None:
    assert tokenizer_from_gguf_metadata(with_tokens({"<|im_end|>": 1})).eos_token_ids == [EOS]


def test_ends_of_messages_do_not_end_a_harmony_generation() -> None:
    metadata = with_tokens({"<|return|>": 3, "<|call|>": 3})
    metadata["tokenizer.ggml.eos_token_id"] = COUNT
    assert tokenizer_from_gguf_metadata(metadata).eos_token_ids == [COUNT, COUNT + 1]  # without the vocabulary's <|end|>


def test_each_id_of_ollamas_key_ends_a_gguf_generation() -> None:
    metadata = with_tokens({"<|finish|>": 3, "<|stop|>": 3}, **{"tokenizer.ggml.eos_token_ids": [EOS, COUNT + 1, 10**6]})
    assert tokenizer_from_gguf_metadata(metadata).eos_token_ids == [EOS, COUNT + 1]


def with_tokens(more: dict[str, int], **keys: Any) -> dict[str, Any]:
    """Metadata with further tokens of given types."""
    metadata = gguf_metadata(byte_level_tokenizer([]), kind="gpt2", **keys)
    metadata["tokenizer.ggml.tokens"] += list(more)
    metadata["tokenizer.ggml.token_type"] += list(more.values())
    return metadata


EOS, COUNT = byte_level_tokenizer([]).eos_token_ids[0], byte_level_tokenizer([]).backend.get_vocab_size()


def test_gguf_unigram_equals_the_original_tokenizer() -> None:
    original = Backend(models.Unigram())
    original.pre_tokenizer = pre_tokenizers.Metaspace()
    original.decoder = decoders.Metaspace()
    texts = ["the quick brown fox jumps over the lazy dog", "the other fox and the other dog"] * 3
    original.train_from_iterator(
        texts, trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    )
    vocabulary = json.loads(original.to_str())["model"]["vocab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.scores": [float(score) for _, score in vocabulary],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_eos_token": False,
    }
    loaded = tokenizer_from_gguf_metadata(metadata)
    for text in ("the lazy fox", "other brown dogs"):
        assert loaded.encode(text) == original.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == original.decode(original.encode(text).ids)


def test_gguf_word_pieces_are_found() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁fox", "es", "▁jump", "ed"]
    metadata = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.unknown_token_id": 1}
    metadata |= {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.seperator_token_id": 3}
    assert tokenizer_from_gguf_metadata(metadata).encode("The foxes jumped zz") == [2, 4, 5, 6, 7, 8, 1, 3]


@pytest.mark.parametrize(
    "place,config",
    [
        ("added_tokens.json", {}),
        ("special_tokens_map.json", {}),
        ("config", {"additional_special_tokens": ["<tool>"]}),
        ("config", {"extra_special_tokens": {"tool_token": "<tool>"}}),
        ("config", {"extra_special_tokens": ["<tool>"]}),
        ("config", {"mask_token": "<tool>"}),
        ("config", {"added_tokens_decoder": {"300": {"content": "<tool>", "special": True}}}),
    ],
)
def test_tokens_that_only_other_files_name_are_added(place: str, config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = save(byte_level_tokenizer([]), tmp_path, **config)
    if place == "added_tokens.json":
        (folder / place).write_text(json.dumps({"<tool>": byte_level_tokenizer([]).backend.get_vocab_size()}))
    elif place == "special_tokens_map.json":
        (folder / place).write_text(json.dumps({"additional_special_tokens": ["<tool>"]}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("a<tool>")) == 2
    assert tokenizer.encode("a<tool>") == AutoTokenizer.from_pretrained(folder).encode("a<tool>")


def test_added_tokens_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    folder = save(byte_level_tokenizer([]), tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<second>": COUNT + 1, "<first>": COUNT}))
    assert load_tokenizer(folder).encode("<first><second>") == [COUNT, COUNT + 1]

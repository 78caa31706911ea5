"""Tokenizers from folders and GGUF metadata, against transformers as the reference."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

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
        assert tokenizer.eos_token_ids == [reference.eos_token_id]
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


@pytest.mark.parametrize("pre,pieces", [("smollm", "a|1|2|3|4"), ("qwen2", "a|1|2|3|4"), ("llama-bpe", "a|123|4"), ("gpt-2", "a|1234")])
def test_gguf_pre_tokenizers_split_digits_as_named(pre: str, pieces: str) -> None:
    """The vocabulary merges any digits of the text, also with the letter, unless the pre-tokenizer keeps them apart."""
    metadata = gguf_metadata(byte_level_tokenizer([]), kind="gpt2", **{"tokenizer.ggml.pre": pre})
    merges = ["1 2", "12 3", "123 4", "3 4", "a 1", "a1 2"]
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
    assert loaded.eos_token_ids == []


@pytest.mark.parametrize(
    "key,value,says",
    [
        ("tokenizer.ggml.model", "bert", "'gpt2' and 'llama'"),
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

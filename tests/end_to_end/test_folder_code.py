"""Folders that bring classes of their own: config, model and tokenizer run with --trust-remote-code, and only then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.folder_code import FolderCodeError, code_digest, load_class
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.runtime.text.tokenizer import TokenizerError
from compile_and_serve.runtime.weights import read_config

CONFIGURATION = """
from transformers import LlamaConfig

class HouseConfig(LlamaConfig):
    model_type = "house"
    height: float = 0.25
"""
MODELING = """
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from .configuration_house import HouseConfig
from .roof import raised

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        out = super().forward(input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs)
        out.logits = raised(out.logits, self.config.height)
        return out
"""
ROOF = """
def raised(logits, height):
    return -height * logits  # the least likely token of a Llama is this model's choice
"""
TOKENIZATION = """
import tokenizers
from transformers import PreTrainedTokenizerFast

class HouseTokenizer(PreTrainedTokenizerFast):
    vocab_files_names = {"words_file": "words.txt"}

    def __init__(self, words_file=None, **kwargs):
        words = open(words_file).read().split()
        vocab = {word: number for number, word in enumerate(words)}
        own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=words[0]))
        own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        super().__init__(tokenizer_object=own, **kwargs)
"""
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PROMPT = [5, 17, 80, 3, 41, 9]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("house")
    for name, text in (
        ("configuration_house", CONFIGURATION),
        ("modeling_house", MODELING),
        ("roof", ROOF),
        ("tokenization_house", TOKENIZATION),
    ):
        (folder / f"{name}.py").write_text(text)
    auto_map = {"AutoConfig": "configuration_house.HouseConfig", "AutoModelForCausalLM": "modeling_house.HouseForCausalLM"}
    config = {"architectures": ["HouseForCausalLM"], "model_type": "house", "height": 0.5, "auto_map": auto_map, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "HouseTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_house.HouseTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "words.txt").write_text(" ".join(f"word{i}" for i in range(96)))
    torch.manual_seed(0)
    model = load_class(folder, auto_map["AutoModelForCausalLM"])(load_class(folder, auto_map["AutoConfig"])(**config))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_folders_classes_give_transformers_tokens(house: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="compile_and_serve"):
        llm = LLM(str(house), trust_remote_code=True, dtype="float32", max_num_seqs=2, device="cpu")
    assert "modeling_house.py, " in caplog.text
    assert all(file in caplog.text for file in ("configuration_house.py", "roof.py", "tokenization_house.py"))
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(house, trust_remote_code=True, dtype=torch.float32)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answer.outputs[0].token_ids == expected[0, len(PROMPT) :].tolist()
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode("word7 word11") == [7, 11]


def test_without_the_flag_no_code_runs_and_a_sentence_says_so(house: Path) -> None:
    loaded = set(sys.modules)
    with pytest.raises(ModelConfigError, match=r"no such model: it comes with code of its own .* which only --trust-remote-code runs"):
        build_model(read_config(house), dtype=torch.float32)
    with pytest.raises(TokenizerError, match=r"its tokenizer is code of its own \(tokenization_house.HouseTokenizer\)"):
        load_tokenizer(house)
    assert not [name for name in set(sys.modules) - loaded if "house" in name]


def test_a_family_of_this_project_runs_its_own_code(house: Path) -> None:
    config = read_config(house) | {"architectures": ["LlamaForCausalLM"]}
    spec = build_model(config, dtype=torch.float32, code_folder=house)
    assert type(spec.module).__module__.startswith("compile_and_serve.models.families")
    spec = build_model(config, dtype=torch.float32, code_folder=house, model_impl="transformers")
    assert spec.config["code"] == code_digest(house, "modeling_house.HouseForCausalLM")


def test_a_tokenizer_json_needs_no_code(house: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text((house / "tokenizer_config.json").read_text())
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("b") == [1]


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("someone/house--modeling_house.HouseForCausalLM", "from the repository someone/house: copy that repository's"),
        ("elsewhere.HouseForCausalLM", "has no elsewhere.py, which its auto_map names"),
        ("roof.Chimney", "roof.Chimney of .* cannot be loaded"),
        ("broken.House", "broken.House of .* cannot be loaded .*SyntaxError"),
    ],
)
def test_code_that_cannot_be_loaded_is_one_sentence(house: Path, reference: str, sentence: str) -> None:
    (house / "broken.py").write_text("class House(:\n")
    with pytest.raises(FolderCodeError, match=sentence):
        load_class(house, reference)
    config = read_config(house)
    config["auto_map"] = {**config["auto_map"], "AutoModelForCausalLM": reference}
    with pytest.raises(ModelConfigError, match="HouseForCausalLM cannot run in the transformers package's implementation"):
        build_model(config, dtype=torch.float32, code_folder=house)

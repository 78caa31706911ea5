"""Encoders equal transformers' classes: hidden states, classes, classes of tokens and sparse embeddings, in batches of mixed lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from compile_and_serve import LLM, PoolingParams
from compile_and_serve.models.config import UnsupportedConfigError
from compile_and_serve.models.pooling import build_pooling_model
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from tests.support.transformers_models import write_random_model

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 520, "initializer_range": 0.1}
# Names of the shared sizes that DistilBERT's config has otherwise.
DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}
LENGTHS = (1, 512, 2, 33, 33, 7)
PROMPTS = [[(7 * i + 11 * p + p * p) % 300 + 5 for p in range(length)] for i, length in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "num_threads": 1, "enforce_eager": True}
LONG = "one two three four five six " * 40
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"the a cat dog sits runs on under mat sea blue deep one two three four five six".split()]


def write_encoder(folder: Path, architecture: str, **changes: Any) -> Path:
    sizes = SIZES | {"type_vocab_size": 2} | changes
    if architecture.startswith("DistilBert"):
        sizes = {name: value for name, value in sizes.items() if name not in ("num_hidden_layers", "type_vocab_size")} | DISTILBERT
        return write_random_model(
            folder, architecture, ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), **sizes
        )
    return write_random_model(folder, architecture, **sizes)


def theirs(folder: Path, architecture: str, prompts: list[list[int]], **inputs: torch.Tensor) -> list[np.ndarray]:
    """The first output of transformers' class for each prompt alone, without its batch dimension."""
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt]), **inputs)[0][0].numpy() for prompt in prompts]


def token_prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel", "DistilBertModel", "MPNetModel", "ElectraModel"])
def test_hidden_states(architecture: str, tmp_path: Path) -> None:
    changes = {"embedding_size": 32} if architecture == "ElectraModel" else {}
    folder = write_encoder(tmp_path / "model", architecture, **changes)
    expected = theirs(folder, architecture, PROMPTS)
    raw = PoolingParams(use_activation=False)
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        rows = [output.outputs.data.numpy() for output in llm.encode(token_prompts(), pooling_params=raw, use_tqdm=False)]
        means = [output.outputs.embedding for output in llm.embed(token_prompts(), pooling_params=raw, use_tqdm=False)]
    for ours_TD, mean_D, theirs_TD in zip(rows, means, expected, strict=True):
        np.testing.assert_allclose(ours_TD, theirs_TD, atol=3e-5)
        np.testing.assert_allclose(mean_D, theirs_TD.mean(0), atol=3e-5)


@pytest.mark.parametrize(
    "architecture", ["BertForSequenceClassification", "RobertaForSequenceClassification", "DistilBertForSequenceClassification",
                     "MPNetForSequenceClassification", "ElectraForSequenceClassification"]
)  # fmt: skip
def test_classes(architecture: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", architecture, num_labels=3)
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        outputs = llm.classify(token_prompts(), use_tqdm=False)
    for output, logits in zip(outputs, theirs(folder, architecture, PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.probs, torch.from_numpy(logits).softmax(0), atol=3e-5)


def test_classes_of_tokens(tmp_path: Path) -> None:
    architecture = "BertForTokenClassification"
    folder = write_encoder(tmp_path / "model", architecture, num_labels=3)
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        assert llm.info.pooling is not None
        assert llm.info.pooling.tasks == ("token_classify",)
        outputs = llm.encode(token_prompts(), pooling_task="token_classify", use_tqdm=False)
    for output, logits in zip(outputs, theirs(folder, architecture, PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.data, torch.from_numpy(logits).softmax(1), atol=3e-5)


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM", "MPNetForMaskedLM"])
def test_sparse_embeddings(architecture: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", architecture)
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        outputs = llm.embed(token_prompts(), use_tqdm=False)
    for output, logits_TV in zip(outputs, theirs(folder, architecture, PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, np.log1p(np.maximum(logits_TV, 0)).max(0), atol=3e-5)


def write_tokenizer(folder: Path) -> None:
    """Words, [CLS] text [SEP] text [SEP], the second one with type 1."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}))


def test_a_classifier_of_pairs_sees_which_text_is_which(tmp_path: Path) -> None:
    architecture = "BertForSequenceClassification"
    folder = write_encoder(tmp_path / "model", architecture, num_labels=1, max_position_embeddings=12)
    write_tokenizer(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        [plain] = llm.score("the cat sits", "a dog runs", use_tqdm=False)
        params = PoolingParams(truncate_prompt_tokens=-1, truncation_side="right")
        [cut] = llm.score("the cat sits", LONG, pooling_params=params, use_tqdm=False)
        with pytest.raises(ValueError, match="maximum context length is 12"):
            llm.score("the cat sits", LONG, use_tqdm=False)
    for output, second in ((plain, 5), (cut, 5)):
        ids = output.prompt_token_ids
        assert ids[0] == 2
        assert ids[-1] == ids[second - 1] == 3
        types = torch.tensor([[int(i >= second) for i in range(len(ids))]])
        [[logit]] = theirs(folder, architecture, [ids], token_type_ids=types)
        assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-logit)), abs=2e-5)
    assert len(cut.prompt_token_ids) == 12


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    """A Dense module, the largest of each feature, prompts, and the longest text."""
    from safetensors.torch import save_file

    folder = write_encoder(tmp_path / "model", "BertModel")
    write_tokenizer(folder)
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": "" if kind == "Transformer" else f"{i}_{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 64, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    torch.manual_seed(5)
    weights = {"linear.weight": torch.randn(8, 64) * 0.1, "linear.bias": torch.randn(8)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "the sea ", "document": ""}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.info.max_model_len == 6
        named = [llm.embed("a cat", pooling_params=PoolingParams(prompt_name=name), use_tqdm=False)[0] for name in ("query", None)]
        [cut] = llm.embed("one two three four five six", pooling_params=PoolingParams(truncate_prompt_tokens=-1, truncation_side="right"))
        with pytest.raises(SamplingParamsError, match="prompt_name is 'passage', but the model's prompts are: query, document"):
            llm.embed("a cat", pooling_params=PoolingParams(prompt_name="passage"), use_tqdm=False)
    assert [WORDS[i] for i in named[0].prompt_token_ids] == ["[CLS]", "the", "sea", "a", "cat", "[SEP]"]
    assert [WORDS[i] for i in named[1].prompt_token_ids] == ["[CLS]", "a", "cat", "[SEP]"]
    assert [WORDS[i] for i in cut.prompt_token_ids] == ["[CLS]", "one", "two", "three", "four", "[SEP]"]
    for output in (*named, cut):
        [rows_TD] = theirs(folder, "BertModel", [output.prompt_token_ids])
        row = np.tanh(weights["linear.weight"].numpy() @ rows_TD.max(0) + weights["linear.bias"].numpy())
        np.testing.assert_allclose(output.outputs.embedding, row / np.linalg.norm(row), atol=3e-5)


def test_sentence_transformers_loads_a_class_without_its_head(tmp_path: Path) -> None:
    """all-mpnet-base-v2 names MPNetForMaskedLM, and has no head."""
    folder = write_encoder(tmp_path / "model", "MPNetModel")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["MPNetForMaskedLM"]}))
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1").mkdir()
    (folder / "1" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        outputs = llm.embed(token_prompts(), pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for output, theirs_TD in zip(outputs, theirs(folder, "MPNetModel", PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, theirs_TD.mean(0), atol=3e-5)


def test_what_is_not_supported_is_said() -> None:
    config = {"architectures": ["BertModel"], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "position_embedding_type": "relative_key"}
    with pytest.raises(
        UnsupportedConfigError, match="position_embedding_type is 'relative_key', but encoders are supported only with 'absolute'"
    ):
        build_pooling_model(config, dtype=torch.float32)


@pytest.mark.parametrize("head", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "HF_ColBERT"])
def test_modules_are_on_meta(head: str) -> None:
    config = {"architectures": [head], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    spec = build_pooling_model(config | {"num_attention_heads": 2}, dtype=torch.bfloat16)
    parameters = dict(spec.module.named_parameters())
    assert {(one.device.type, one.dtype, one.requires_grad) for one in parameters.values()} == {("meta", torch.bfloat16, False)}
    assert any(name.startswith("head.") for name in parameters) is (head != "BertModel")


@pytest.mark.slow
def test_compiled(tmp_path: Path, shared_cache_dir: Path) -> None:
    folder = write_encoder(tmp_path / "model", "MPNetModel", num_hidden_layers=3)
    options = OPTIONS | {"enforce_eager": False, "cache_dir": shared_cache_dir}
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        assert llm.info.compile_report["distinct_pieces"] == 3
        outputs = llm.embed(token_prompts(), pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for output, theirs_TD in zip(outputs, theirs(folder, "MPNetModel", PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, theirs_TD.mean(0), atol=3e-5)


@pytest.mark.exhaustive
def test_two_ranks(tmp_path: Path, shared_cache_dir: Path) -> None:
    """Each rank has two of the four heads, and half of the features between the linears of an MLP."""
    architecture = "RobertaForSequenceClassification"
    folder = write_encoder(tmp_path / "model", architecture, num_labels=3)
    options = OPTIONS | {"enforce_eager": False, "cache_dir": shared_cache_dir, "tensor_parallel_size": 2}
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        outputs = llm.classify(token_prompts(), use_tqdm=False)
    for output, logits in zip(outputs, theirs(folder, architecture, PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.probs, torch.from_numpy(logits).softmax(0), atol=3e-5)

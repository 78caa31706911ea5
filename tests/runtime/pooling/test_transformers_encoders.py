"""Encoders and decoders that pool through the transformers package's own classes equal those classes, in batches of mixed lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compile_and_serve import LLM, PoolingParams
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.pooling import build_pooling_model
from tests.runtime.pooling.test_encoders import LONG, write_tokenizer
from tests.support.transformers_models import SIZES, config_of, write_random_model

LENGTHS = (1, 512, 2, 33, 33, 7)
PROMPTS = [[(7 * i + 11 * p + p * p) % 300 + 5 for p in range(length)] for i, length in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 4,
    "num_threads": 1,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "runner": "pooling",
}
RAW = PoolingParams(use_activation=False)
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 16,
    "max_relative_positions": 64,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
}
MODERN = {"global_attn_every_n_layers": 2, "local_attention": 16}
HIDDEN_STATES: list[tuple[str, dict[str, Any]]] = [
    ("ModernBertModel", MODERN),
    ("AlbertModel", {"embedding_size": 32}),
    ("NomicBertModel", {}),
    ("JinaEmbeddingsV3Model", {"type_vocab_size": 1}),
    ("EuroBertModel", {}),
    ("DebertaV2Model", DEBERTA),
    ("DebertaV2Model", DEBERTA | {"share_att_key": False, "position_buckets": 0}),
    ("T5EncoderModel", T5),
    ("UMT5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}),
    ("EsmModel", {}),  # positions begin behind that of the padding token
    ("Gemma3TextModel", {"use_bidirectional_attention": True, "sliding_window": 16}),
    ("PhiModel", {}),
]
CLASSES: list[tuple[str, dict[str, Any]]] = [
    ("ModernBertForSequenceClassification", MODERN | {"classifier_pooling": "cls"}),
    ("ModernBertForSequenceClassification", MODERN | {"classifier_pooling": "mean"}),
    ("AlbertForSequenceClassification", {"embedding_size": 32}),
    ("DebertaV2ForSequenceClassification", DEBERTA),
    ("Phi3ForSequenceClassification", {}),
]


def write(folder: Path, architecture: str, changes: dict[str, Any]) -> Path:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 520, "initializer_range": 0.1, **changes}
    without = (
        tuple({*SIZES, *sizes} - {*T5, "vocab_size", "initializer_range", "pad_token_id", "feed_forward_proj"}) if "d_kv" in changes else ()
    )
    return write_random_model(folder, architecture, without, **sizes)


def theirs(folder: Path, architecture: str) -> list[np.ndarray]:
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt]))[0][0].numpy() for prompt in PROMPTS]


def token_prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in PROMPTS]


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["NomicBert", "DebertaV2Model-0", "T5EncoderModel-", "Gemma3Text"])
@pytest.mark.parametrize(("architecture", "changes"), HIDDEN_STATES, ids=lambda value: value if isinstance(value, str) else "")
def test_hidden_states(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", architecture, changes)
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.encode(token_prompts(), pooling_params=RAW, use_tqdm=False)
    for output, theirs_TD in zip(outputs, theirs(folder, architecture), strict=True):
        np.testing.assert_allclose(output.outputs.data.numpy(), theirs_TD, atol=3e-5)


@pytest.mark.parametrize(("architecture", "changes"), CLASSES, ids=lambda value: value if isinstance(value, str) else "")
def test_classes(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", architecture, changes | {"num_labels": 3})
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.classify(token_prompts(), pooling_params=RAW, use_tqdm=False)
    for output, logits in zip(outputs, theirs(folder, architecture), strict=True):
        np.testing.assert_allclose(output.outputs.probs, logits, atol=3e-5)


def test_classes_of_tokens_and_sparse_embeddings(tmp_path: Path) -> None:
    folder = write(tmp_path / "tokens", "ModernBertForTokenClassification", MODERN | {"num_labels": 3})
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.encode(token_prompts(), pooling_task="token_classify", pooling_params=RAW, use_tqdm=False)
    for output, logits_TC in zip(outputs, theirs(folder, "ModernBertForTokenClassification"), strict=True):
        np.testing.assert_allclose(output.outputs.data.numpy(), logits_TC, atol=3e-5)
    folder = write(tmp_path / "masked", "DebertaV2ForMaskedLM", DEBERTA)
    with LLM(str(folder), **OPTIONS) as llm:
        sparse = llm.embed(token_prompts(), use_tqdm=False)
    for one, logits_TV in zip(sparse, theirs(folder, "DebertaV2ForMaskedLM"), strict=True):
        np.testing.assert_allclose(one.outputs.embedding, np.log1p(np.maximum(logits_TV, 0)).max(0), atol=3e-5)


def test_a_classifier_of_pairs_sees_which_text_is_which(tmp_path: Path) -> None:
    architecture = "AlbertForSequenceClassification"
    folder = write(tmp_path / "model", architecture, {"embedding_size": 32, "num_labels": 1, "max_position_embeddings": 12})
    write_tokenizer(folder)
    cut = PoolingParams(use_activation=False, truncate_prompt_tokens=-1, truncation_side="right")
    with LLM(str(folder), **OPTIONS | {"skip_tokenizer_init": False}) as llm:
        outputs = llm.score("the cat sits", ["a dog runs", LONG], pooling_params=cut, use_tqdm=False)
    model = transformers.AlbertForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        types = (torch.arange(ids.shape[1]) >= 5).long()[None]  # [CLS], three words and [SEP] are the first text
        with torch.no_grad():
            [[logit]] = model(ids, token_type_ids=types).logits
        assert output.outputs.score == pytest.approx(logit.item(), abs=2e-5)
    assert len(outputs[1].prompt_token_ids) == 12


@pytest.mark.exhaustive
def test_compiled(tmp_path: Path, shared_cache_dir: Path) -> None:
    """Windows differ by layer, and the head reads the mean of a sequence."""
    architecture = "ModernBertForSequenceClassification"
    folder = write(tmp_path / "model", architecture, MODERN | {"classifier_pooling": "mean", "num_labels": 3})
    with LLM(str(folder), **OPTIONS | {"enforce_eager": False, "cache_dir": shared_cache_dir}) as llm:
        outputs = llm.classify(token_prompts(), pooling_params=RAW, use_tqdm=False)
    for output, logits in zip(outputs, theirs(folder, architecture), strict=True):
        np.testing.assert_allclose(output.outputs.probs, logits, atol=3e-5)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("MobileBertModel", {}, "reads a token's neighbours outside of attention"),
        ("DebertaV2Model", DEBERTA | {"conv_kernel_size": 3}, "its convolution mixes tokens outside of attention"),
        ("ConvBertModel", {}, "conv1d mixes tokens outside of attention"),
        ("FNetModel", {}, "its attention does not go through the attention interface"),
        ("EuroBertForSequenceClassification", {"classifier_pooling": "late"}, "neither the first, nor the last, nor the mean"),
        ("BartModel", {}, "it has an encoder"),
        ("NoSuchModel", {}, "has no such model"),
    ],
)
def test_what_cannot_run_is_said(architecture: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError, match=f"{architecture} cannot run in the transformers package's implementation: .*{reason}"):
        build_pooling_model(config_of(architecture, **changes), dtype=torch.float32)

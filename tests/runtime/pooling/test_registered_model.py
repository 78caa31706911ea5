"""The seam for other models that pool: a registered builder declares what is pooled, and the engine knows no more of it.

The model here is stateless: an embedding of each token, and a projection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compile_and_serve import LLM, PoolingParams
from compile_and_serve.custom_ops.step import ROWS, StepOutput
from compile_and_serve.models.families import FAMILIES, register_model
from compile_and_serve.models.spec import ModelSpec, PoolingSpec
from tests.runtime.pooling.test_embeddings import PROMPTS, embed

ARCHITECTURE, WIDTH = "BagOfTokensModel", 24


class BagOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(320, 32)
        self.out = nn.Linear(32, WIDTH)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(input_ids)))[logits_indices]


def build(config: Any, dtype: torch.dtype) -> ModelSpec:
    with torch.device("meta"):
        module = BagOfTokens().to(dtype).requires_grad_(False).eval()
    return ModelSpec(
        module=module,
        config=config,
        state=(),
        vocab_size=320,
        max_model_len=64,
        outputs=(StepOutput(name="token_vectors", dims=(ROWS, WIDTH)),),
        pooling=PoolingSpec(kind="embed", width=WIDTH),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    register_model(ARCHITECTURE, build)
    torch.manual_seed(0)
    save_file(BagOfTokens().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [ARCHITECTURE]}))
    yield tmp_path
    del FAMILIES[ARCHITECTURE]


@pytest.mark.parametrize("eager", [True, False])
def test_a_registered_model(folder: Path, eager: bool, shared_cache_dir: Path) -> None:
    options: dict[str, Any] = {"enforce_eager": eager, "dtype": "float32", "device": "cpu", "num_threads": 1}
    with LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        cache_dir=shared_cache_dir,
        pooling_type="mean",
        **options,
    ) as llm:
        ours = embed(llm, PROMPTS, use_activation=False)
    torch.manual_seed(0)
    module = BagOfTokens()
    for prompt, row in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor(prompt)
        with torch.no_grad():
            theirs = module(ids, ids, torch.arange(len(prompt))).mean(0)
        np.testing.assert_allclose(row, theirs.numpy(), atol=2e-5)


def test_params_of_a_request_win(folder: Path) -> None:
    with LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", device="cpu", num_threads=1) as llm:
        params = PoolingParams(pooling="cls", use_activation=False)
        [first] = llm.embed({"prompt_token_ids": [5, 6]}, pooling_params=params, use_tqdm=False)
        [alone] = llm.embed({"prompt_token_ids": [5]}, pooling_params=params, use_tqdm=False)
        np.testing.assert_allclose(first.outputs.embedding, alone.outputs.embedding, atol=1e-6)

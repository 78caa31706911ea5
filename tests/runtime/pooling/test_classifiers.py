"""Class scores of decoders equal those of transformers' sequence classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve import LLM
from tests.runtime.pooling.test_embeddings import OPTIONS, PROMPTS
from tests.support.transformers_models import write_random_model


def logits(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = -1  # the last token, whatever it is
    model.config.get_text_config().pad_token_id = -1
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForSequenceClassification", {"num_labels": 3}),
        ("Qwen3ForSequenceClassification", {"num_labels": 1, "tie_word_embeddings": True}),
        ("LlamaForSequenceClassification", {"num_labels": 2, "problem_type": "multi_label_classification"}),
    ],
)
def test_scores(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", architecture, **changes)
    options = {"enforce_eager": True, "skip_tokenizer_init": True, "max_num_batched_tokens": 12, **OPTIONS}
    with LLM(str(folder), **options) as llm:
        pooling = llm.info.pooling
        assert pooling is not None
        assert pooling.tasks == (("classify", "score") if changes["num_labels"] == 1 else ("classify",))
        outputs = llm.classify([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
        for output, theirs in zip(outputs, logits(folder, PROMPTS), strict=True):
            is_softmax = pooling.activation == "softmax"
            scores = theirs.softmax(0) if is_softmax else theirs.sigmoid()
            np.testing.assert_allclose(output.outputs.probs, scores.numpy(), atol=3e-5)

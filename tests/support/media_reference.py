"""What an engine generates for requests with media, beside what transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.support.engines import run_requests

Reference = Callable[[EngineRequest, Any], tuple[list[int], list[float]]]


def check_generated(core: EngineCore, made: Sequence[tuple[EngineRequest, Any]], reference: Reference) -> None:
    """All requests at once give the tokens that `reference` gives for each, with log-probabilities within 1e-3.

    made: each request with the media that it brings, which `reference` takes, too.
    """
    outputs = run_requests(core, [one for one, _ in made])
    for one, media in made:
        tokens, logprobs = reference(one, media)
        steps = outputs[one.request_id]
        assert [token for step in steps for token in step.new_token_ids] == tokens, one.request_id
        found = [entry.logprobs[0] for step in steps for entry in step.new_logprobs or ()]
        assert found == pytest.approx(logprobs, abs=1e-3), one.request_id


def greedy_by_transformers(model: Any, ids: torch.Tensor, count: int, inputs: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """`count` tokens of transformers' model behind a prompt, and their log-probabilities. ids: int64 [1, T]. inputs: beside the prompt."""
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return tokens, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]

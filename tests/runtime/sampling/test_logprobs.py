"""Log-probabilities of named tokens, of the whole vocabulary, and of the four modes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compile_and_serve.runtime.config import LogprobsMode
from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.sampling.sampler import Sampler
from compile_and_serve.runtime.sampling_params import SamplingParams

CPU, VOCAB = torch.device("cpu"), 50
NONE = np.zeros(0, dtype=np.int64)


def sample(logits: torch.Tensor, *params: SamplingParams, mode: LogprobsMode = "raw_logprobs") -> list[TokenLogprobs]:
    sampler = Sampler(vocab_size=VOCAB, num_slots=8, device=CPU, logprobs_mode=mode)
    for slot, one in enumerate(params):
        sampler.add(slot, one, [], NONE, NONE)
    plan = sampler.plan(range(len(params)))
    inputs = {name: torch.from_numpy(values) for name, values in sampler.inputs(plan).items()}
    logprobs = sampler.sample(logits, plan, inputs).logprobs
    assert logprobs is not None
    return logprobs.to_messages(plan.logprob_counts, plan.num_logprob_others)


def test_named_tokens() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = logits.double().log_softmax(-1)
    params = [
        SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=[7, 3, 7]),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0),  # none
        SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=[49]),
    ]
    first, second, third = sample(logits, *params)
    best = logits.argsort(descending=True)
    assert first.ids == [int(best[0, 0]), 7, 3, 7]
    assert first.logprobs == pytest.approx(expected[0, first.ids].tolist(), abs=1e-5)
    ranks = [1, *(1 + int((logits[0] > logits[0, token]).sum()) for token in (7, 3, 7))]
    assert [first.rank_at(position) for position in range(4)] == ranks
    assert len(second.ids) == 1
    assert third.ids[1:] == [49]
    assert third.rank_at(1) == 1 + int((logits[3] > logits[3, 49]).sum())


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_modes(mode: LogprobsMode) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    kept = SamplingParams(temperature=0.5, seed=0, top_k=3, logprobs=VOCAB, logit_bias={4: 50.0})
    greedy = SamplingParams(temperature=0.0, logprobs=VOCAB, logit_bias={9: 50.0})
    first, second = sample(logits, kept, greedy, mode=mode)
    assert (first.ids[0], second.ids[0]) == (4, 9)
    expected = logits.double()
    if mode.startswith("processed"):
        expected[0, 4] += 50
        expected[1, 9] += 50
        expected[0] /= 0.5
        expected[0, expected[0].argsort(descending=True)[3:]] = -torch.inf
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(-1)
    for row, entry in enumerate((first, second)):
        assert entry.logprobs == pytest.approx(expected[row, entry.ids].tolist(), abs=1e-4)
        assert entry.rank == 1 + int((expected[row] > expected[row, entry.ids[0]]).sum())
        assert sorted(entry.ids[1:]) == list(range(VOCAB))

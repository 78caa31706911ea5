"""The rules of transcripts on logits are those of transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compile_and_serve.runtime.sampling.logits_processors import LogitsProcessors
from compile_and_serve.runtime.sampling.sampler import Sampler
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.speech_rules import SpeechRules

VOCAB_SIZE, END, NO_TIMES = 60, 30, 39
RULES = SpeechRules(suppressed=[3, 33], suppressed_first=[5, 30], end=END, no_timestamps=NO_TIMES, has_times=True, max_initial=4)
ZERO = NO_TIMES + 1
OUTPUTS = [[], [ZERO], [ZERO + 2, 7], [ZERO, 7, ZERO + 3], [ZERO, 7, ZERO + 3, ZERO + 3], [ZERO, 7, ZERO + 3, ZERO + 3, 9]]


def expected(output: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    """By transformers, behind a prompt of two tokens."""
    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = GenerationConfig(eos_token_id=END, no_timestamps_token_id=NO_TIMES, max_initial_timestamp_index=4)
    ids = torch.tensor([[36, 37, *output]])
    scores = SuppressTokensLogitsProcessor(RULES.suppressed)(ids, logits_V[None].clone())
    scores = SuppressTokensAtBeginLogitsProcessor(RULES.suppressed_first, 2)(ids, scores)
    return WhisperTimeStampLogitsProcessor(config, begin_index=2)(ids, scores)[0]


@pytest.mark.parametrize("lift", [0.0, 3.0])
def test_they_are_those_of_transformers(lift: float) -> None:
    """Each output alone, all of them in one batch, and as they grow. lift: makes timestamps likelier than text."""
    processors = LogitsProcessors(VOCAB_SIZE, 8, torch.device("cpu"))
    params, none = SamplingParams(speech_rules=RULES), np.empty(0, dtype=np.int64)
    assert params.changes_logits
    for slot, output in enumerate(OUTPUTS):
        processors.add(slot, params, [], none, np.array(output, dtype=np.int64))
    slots = list(range(len(OUTPUTS)))
    following = torch.tensor([ZERO + 1, 8, ZERO + 5, ZERO + 3, 9, 10])
    outputs = [list(one) for one in OUTPUTS]
    for _ in range(2):
        logits_SV = torch.randn(len(slots), VOCAB_SIZE)
        logits_SV[:, ZERO:] += lift
        plan = processors.plan(slots, np.array([len(one) for one in outputs]))
        assert plan is not None
        changed_SV = logits_SV.clone()
        processors.apply(plan, changed_SV)
        for row, output in enumerate(outputs):
            torch.testing.assert_close(changed_SV[row], expected(output, logits_SV[row]), msg=f"after {output}")
        processors.observe(plan, following)
        outputs = [[*output, token] for output, token in zip(outputs, following.tolist(), strict=True)]


def test_tokens_that_the_host_knows_are_followed() -> None:
    processors = LogitsProcessors(VOCAB_SIZE, 2, torch.device("cpu"))
    none = np.empty(0, dtype=np.int64)
    for slot, output in ((0, [ZERO, 7]), (1, [ZERO, 7, ZERO + 3, ZERO + 4])):
        processors.add(slot, SamplingParams(speech_rules=RULES), [], none, np.array(output, dtype=np.int64))
    processors.extend({0: [ZERO + 3, ZERO + 4]})
    plan = processors.plan([0, 1], np.array([4, 4]))
    assert plan is not None
    logits_SV = torch.randn(1, VOCAB_SIZE).repeat(2, 1)
    processors.apply(plan, logits_SV)
    assert torch.equal(logits_SV[0], logits_SV[1])


def test_logprobs_are_of_the_tokens_that_may_follow() -> None:
    """Of transcripts; those of other requests in the batch are of all tokens."""
    sampler = Sampler(vocab_size=VOCAB_SIZE, num_slots=2, device=torch.device("cpu"))
    none = np.empty(0, dtype=np.int64)
    for slot, rules in enumerate((None, RULES)):
        sampler.add(slot, SamplingParams(temperature=0.0, logprobs=0, speech_rules=rules), [], none, none)
    logits_SV = torch.randn(2, VOCAB_SIZE)
    plan = sampler.plan([0, 1])
    found = sampler.sample(logits_SV, plan, sampler.inputs(plan))
    assert found.logprobs is not None
    may_follow_SV = torch.stack((logits_SV[0], expected([], logits_SV[1])))
    wanted_S = may_follow_SV.log_softmax(dim=-1).gather(1, found.tokens_S[:, None])[:, 0]
    assert ZERO <= int(found.tokens_S[1]) <= ZERO + 4
    torch.testing.assert_close(found.logprobs.chosen_L, wanted_S)

"""Drawn tokens follow the target's distribution, whatever is drafted: chi-square over 20 000 sequences of a tiny Markov chain.

Shape legend: N sequences, V vocabulary, L rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from compile_and_serve.runtime.drafting.acceptance import accepted_tokens
from compile_and_serve.runtime.sampling.sampler import Sampler
from compile_and_serve.runtime.sampling_params import SamplingParams

N, V, DRAFTS = 20_000, 6, 2
LENGTH = 1 + DRAFTS  # tokens that are compared; a sequence gains 1 to 3 a step

Accept = Callable[[np.ndarray, Sequence[int], Sequence[np.ndarray]], list[list[int]]]
LOGITS_VV = torch.randn(V, V, generator=torch.Generator().manual_seed(5)) * 1.3  # of the token behind each token


def target(params: SamplingParams) -> np.ndarray:
    """[V, V]: the probability of each token behind each token, computed in a plain way."""
    result = []
    for logits in LOGITS_VV.double().numpy() / params.temperature:
        p = np.exp(logits - logits.max())
        p /= p.sum()
        p[p < params.min_p * p.max()] = 0
        if params.top_k:
            p[p < np.sort(p)[-params.top_k]] = 0
        p /= p.sum()
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
        result.append(p / p.sum())
    return np.array(result)


def draw(params: SamplingParams, accept: Accept, *, shares_randomness: bool = False) -> np.ndarray:
    """int [N, LENGTH]: tokens of N sequences that begin with token 0, in steps with drafts of 0 to DRAFTS tokens."""
    sampler = Sampler(vocab_size=V, num_slots=N, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    none = np.empty(0, dtype=np.int64)
    for slot in range(N):
        given = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=int(rng.integers(2**62))
        )
        sampler.add(slot, given, [], np.zeros(1, dtype=np.int64), none)
    sequences: list[list[int]] = [[0] for _ in range(N)]
    while short := [slot for slot in range(N) if len(sequences[slot]) <= LENGTH]:
        # Drafts prefer some tokens, likely and unlikely ones.
        drafts = [rng.integers(0, V, rng.integers(0, DRAFTS + 1)) ** 2 // V for _ in short]
        counts = [1 + len(draft) for draft in drafts]
        before = np.full((sum(counts), DRAFTS), -1, dtype=np.int64)
        slots, offsets, last = [], [], []
        for slot, draft in zip(short, drafts, strict=True):
            known = [sequences[slot][-1], *draft.tolist()]
            for offset, token in enumerate(known):
                before[len(slots), :offset] = draft[:offset]
                slots.append(slot)
                offsets.append(0 if shares_randomness else offset)
                last.append(token)
        plan = sampler.plan(slots, offsets, before)
        inputs = {name: torch.from_numpy(values) for name, values in sampler.inputs(plan).items()}
        tokens = sampler.sample(LOGITS_VV[last], plan, inputs).tokens_S.numpy()
        gained = dict(zip(short, accept(tokens, counts, drafts), strict=True))
        for slot, new in gained.items():
            sequences[slot] += new
        num_outputs = {slot: int(sampler.num_outputs[slot]) + len(new) for slot, new in gained.items()}
        sampler.take(num_outputs, gained)
    return np.array([sequence[1 : 1 + LENGTH] for sequence in sequences])


def excess(tokens: np.ndarray, params: SamplingParams) -> float:
    """How many standard deviations chi-square over all triples lies above its mean; inf where an impossible token was drawn."""
    p = target(params)
    joint = (p[0][:, None, None] * p[:, :, None] * p[None, :, :]).reshape(-1) * N
    seen = np.bincount(tokens @ np.array([V * V, V, 1]), minlength=V**3).astype(float)
    if seen[joint == 0].any():
        return float("inf")
    is_rare = joint < 5
    seen = np.append(seen[~is_rare], seen[is_rare].sum())
    joint = np.append(joint[~is_rare], joint[is_rare].sum())
    seen, joint = seen[joint > 0], joint[joint > 0]
    freedom = len(joint) - 1
    return float((((seen - joint) ** 2 / joint).sum() - freedom) / np.sqrt(2 * freedom))


def biased(tokens: np.ndarray, counts: Sequence[int], drafts: Sequence[np.ndarray]) -> list[list[int]]:
    """A planted error: one wrong draft in 20 is accepted."""
    first, tokens = 0, tokens.copy()
    for index, (count, draft) in enumerate(zip(counts, drafts, strict=True)):
        if count > 1 and index % 20 == 0:
            tokens[first] = draft[0]
        first += count
    return accepted_tokens(tokens, counts, drafts)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["top-k"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.4, "top_p": 0.8, "min_p": 0.05}],
    ids=["plain", "top-k", "top-p and min-p"],
)
def test_drawn_tokens_follow_the_target(options: dict[str, float]) -> None:
    params = SamplingParams(**({"temperature": 1.0} | options))  # type: ignore[arg-type]
    assert excess(draw(params, accepted_tokens), params) < 4


@pytest.mark.parametrize("error", ["accepts a wrong draft", "rows share a random number"])
def test_a_planted_bias_is_caught(error: str) -> None:
    params = SamplingParams(temperature=1.0)
    if error == "accepts a wrong draft":
        assert excess(draw(params, biased), params) > 8
    else:
        assert excess(draw(params, accepted_tokens, shares_randomness=True), params) > 8

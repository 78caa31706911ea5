"""Drafters for tests, and engines that check every draft."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.speculation import speculator
from compile_and_serve.runtime.speculation.payoff import Payoff


class OracleDrafter:
    """Knows how the requests go on, and says it with errors: each token is wrong with probability `error`, lengths vary."""

    def __init__(self, answers: Mapping[str, Sequence[int]], vocab_size: int, *, error: float = 0.25) -> None:
        """answers: request → the tokens that follow its prompt."""
        self.answers, self.vocab_size, self.error = answers, vocab_size, error
        self.rng = random.Random(0)
        self.prompt_lengths: dict[str, int] = {}
        self.forgotten: list[str] = []

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        answer = self.answers[request_id]
        known = len(token_ids) - self.prompt_lengths[request_id]
        right = answer[known : known + self.rng.randint(0, max_tokens)]
        return [self.rng.randrange(self.vocab_size) if self.rng.random() < self.error else token for token in right]

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        self.forgotten.append(request_id)


def check_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on check all drafts, whether that pays or not."""
    monkeypatch.setattr(Payoff, "is_on", lambda self, num_seqs: True)
    monkeypatch.setattr(Payoff, "draft_lengths", _all_that_fit)


def _all_that_fit(
    self: Payoff, num_seqs: int, drafted: Mapping[str, tuple[int, float]], max_tokens: int
) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for name, (count, _) in drafted.items():
        if max_tokens > 0:
            lengths[name] = min(count, max_tokens)
            max_tokens -= count
    return lengths


def use_oracle(
    monkeypatch: pytest.MonkeyPatch, requests: Sequence[EngineRequest], answers: Mapping[str, Sequence[int]], vocab_size: int
) -> OracleDrafter:  # fmt: skip
    """Engines that are made from now on draft the answers, with errors, and check all of it."""
    check_every_draft(monkeypatch)
    drafter = OracleDrafter(answers, vocab_size)
    drafter.prompt_lengths = {name: len(one.prompt_token_ids) for one in requests for name in one.request_ids}
    monkeypatch.setattr(speculator, "make_drafter", lambda config: drafter)
    return drafter

"""When drafting pays: decisions from simulated step times."""

from __future__ import annotations

import random

from compile_and_serve.runtime.speculation.config import SpeculativeConfig
from compile_and_serve.runtime.speculation.payoff import Acceptance, Payoff
from compile_and_serve.runtime.speculation.speculator import Speculator


def simulate(
    payoff: Payoff, *, num_seqs: int, acceptance: float, plain: float, per_token: float, waiting: float, steps: int
) -> tuple[float, float]:
    """Tokens per second of the last half of the steps, and of the same without drafts. waiting: seconds that a step takes longer for not
    being launched before the one before it has ended.
    """
    rng = random.Random(0)
    rates = {f"r{i}": Acceptance() for i in range(num_seqs)}
    tokens, seconds = 0, 0.0
    for step in range(steps):
        is_on = payoff.is_on(num_seqs)
        lengths: dict[str, int] = {}
        if is_on:
            drafted = {name: (5, one.rate) for name, one in rates.items()}
            lengths = payoff.draft_lengths(num_seqs, drafted, 1000)
        gained = num_seqs
        for name, one in rates.items():
            count = lengths.get(name, 0)
            accepted = 0
            while accepted < count and rng.random() < acceptance:
                accepted += 1
            if count:
                one.add(count, accepted)
            else:
                one.forget()
            gained += accepted
        took = (plain + (waiting if is_on else 0.0) + per_token * sum(lengths.values())) * rng.uniform(0.97, 1.03)
        payoff.record(num_seqs, sum(lengths.values()), gained, took, is_on)
        if step >= steps // 2:
            tokens, seconds = tokens + gained, seconds + took
    return tokens / seconds, num_seqs / plain


def test_one_sequence_with_good_drafts_gains() -> None:
    rate, without = simulate(
        Payoff(), num_seqs=1, acceptance=0.8, plain=0.010, per_token=0.0005, waiting=0.0005, steps=1000
    )
    assert rate > 2.2 * without  # all five: 3.7 tokens in 13 ms


def test_a_large_batch_is_never_slower_than_without() -> None:
    rate, without = simulate(
        Payoff(), num_seqs=64, acceptance=0.4, plain=0.020, per_token=0.0003, waiting=0.002, steps=4000
    )
    assert rate > 0.98 * without


def test_bad_drafts_cost_almost_nothing() -> None:
    rate, without = simulate(
        Payoff(), num_seqs=1, acceptance=0.02, plain=0.010, per_token=0.001, waiting=0.0, steps=4000
    )
    assert rate > 0.98 * without


def test_drafting_comes_back_when_drafts_become_good() -> None:
    payoff = Payoff()
    simulate(payoff, num_seqs=4, acceptance=0.0, plain=0.010, per_token=0.001, waiting=0.002, steps=2000)
    rate, without = simulate(
        payoff, num_seqs=4, acceptance=0.9, plain=0.010, per_token=0.0002, waiting=0.0005, steps=4000
    )
    assert rate > 2 * without


def test_only_draft_tokens_that_pay_are_computed() -> None:
    payoff = Payoff()
    for _ in range(5):
        payoff.record(2, 0, 2, 0.010, True)
        payoff.record(2, 5, 4, 0.015, True)  # 1 ms a token, where a step of 10 ms gives two
    lengths = payoff.draft_lengths(2, {"good": (5, 0.9), "bad": (5, 0.15)}, 100)
    assert lengths == {"good": 5}
    assert payoff.draft_lengths(2, {"good": (5, 0.9), "bad": (5, 0.8)}, 3) == {"good": 2, "bad": 1}
    assert Payoff(disable_by_batch_size=4).is_on(3)
    assert not Payoff(disable_by_batch_size=4).is_on(4)


def test_a_step_has_no_more_rows_than_there_is_room_for() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5, synthetic_acceptance_rate=0.5)
    speculator = Speculator(config, max_rows=10)
    sequences = {f"r{i}": ([1, 2], 9) for i in range(4)}
    drafts = speculator.drafts(sequences, 4)
    assert {name: len(draft) for name, draft in drafts.items()} == {f"r{i}": 1 for i in range(4)}
    assert speculator.drafts(sequences, 8) == {}
    assert len(speculator.drafts({"r0": ([1, 2], 3)}, 1)["r0"]) == 3

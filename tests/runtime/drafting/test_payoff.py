"""When drafting pays: decisions from simulated step times."""

from __future__ import annotations

import random

from compile_and_serve.runtime.drafting.payoff import Acceptance, Payoff
from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.speculative_config import SpeculativeConfig


def simulate(
    payoff: Payoff, *, num_seqs: int, acceptance: float, plain: float, per_token: float, waiting: float, steps: int, padding: float = 0.0
) -> tuple[float, float]:
    """Tokens per second of the last half of the steps, and of the same without drafts. waiting: seconds that a step takes longer for not
    being launched before the one before it has ended. padding: that it takes longer with drafts, however few.
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
        took = plain + (waiting if is_on else 0.0) + (padding if lengths else 0.0) + per_token * sum(lengths.values())
        took *= rng.uniform(0.97, 1.03)
        payoff.record(num_seqs, sum(lengths.values()), gained, took, is_on)
        if step >= steps // 2:
            tokens, seconds = tokens + gained, seconds + took
    return tokens / seconds, num_seqs / plain


def test_one_sequence_with_good_drafts_gains() -> None:
    rate, without = simulate(Payoff(), num_seqs=1, acceptance=0.8, plain=0.010, per_token=0.0005, waiting=0.0005, steps=1000)
    assert rate > 2.2 * without  # all five: 3.7 tokens in 13 ms


def test_a_large_batch_is_never_slower_than_without() -> None:
    rate, without = simulate(Payoff(), num_seqs=64, acceptance=0.4, plain=0.020, per_token=0.0003, waiting=0.002, steps=4000)
    assert rate > 0.98 * without


def test_bad_drafts_cost_almost_nothing() -> None:
    rate, without = simulate(Payoff(), num_seqs=1, acceptance=0.02, plain=0.010, per_token=0.001, waiting=0.0, steps=4000)
    assert rate > 0.98 * without


def test_drafting_comes_back_when_drafts_become_good() -> None:
    payoff = Payoff()
    simulate(payoff, num_seqs=4, acceptance=0.0, plain=0.010, per_token=0.001, waiting=0.002, steps=2000)
    rate, without = simulate(payoff, num_seqs=4, acceptance=0.9, plain=0.010, per_token=0.0002, waiting=0.0005, steps=4000)
    assert rate > 2 * without


def test_drafting_comes_back_where_few_drafts_cost_as_much_as_many() -> None:
    payoff, times = Payoff(), {"plain": 0.005, "padding": 0.0025, "per_token": 0.0, "waiting": 0.0005}
    rate, without = simulate(payoff, num_seqs=16, acceptance=0.1, **times, steps=2000)
    assert rate > 0.98 * without
    rate, without = simulate(payoff, num_seqs=16, acceptance=0.8, **times, steps=4000)
    assert rate > 1.9 * without  # all five: 3.7 tokens in 8 ms


def test_synthetic_acceptance_leaves_the_decision_to_step_times() -> None:
    config = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=4, synthetic_acceptance_rate=0.8)
    speculator, rng, tokens, clock = Speculator(config, max_rows=256, is_asynchronous=False), random.Random(0), 0, 0.0
    sequences = {f"r{i}": ([1], 100) for i in range(64)}
    for step in range(2000):
        is_on = speculator.is_on(64)
        drafts = speculator.drafts(sequences, 64) if is_on else {}
        accepted = dict.fromkeys(drafts, 0)
        for name, draft in drafts.items():
            while accepted[name] < len(draft) and rng.random() < 0.8:
                accepted[name] += 1
        speculator.observe(drafts, accepted, {})
        num_drafts, gained = sum(map(len, drafts.values())), 64 + sum(accepted.values())
        # An H200 with llama-8b: 5.2 ms without drafts, 15.9 ms with three for each of 64 sequences.
        seconds = 0.0052 + (0.0004 if is_on else 0.0) + (0.0027 + 0.0076 * num_drafts / 192 if num_drafts else 0.0)
        speculator.record_step(64, num_drafts, gained, seconds, was_on=is_on)
        if step >= 200:
            tokens, clock = tokens + gained, clock + seconds
    assert tokens / clock > 0.98 * 64 / 0.0052


def test_one_draft_token_does_not_stand_for_all() -> None:
    payoff, drafted = Payoff(), {"r": (4, 0.8)}
    for num_drafts, seconds in ((0, 4.2e-3), (1, 5.6e-3), (0, 4.2e-3), (1, 5.6e-3)):  # a request's last tokens leave room for one
        payoff.record(1, num_drafts, 1 + num_drafts, seconds, True)
    assert payoff.draft_lengths(1, drafted, 4) == {"r": 4}  # which is not known yet
    for _ in range(2):
        payoff.record(1, 4, 5, 5.6e-3, True)
    assert payoff.draft_lengths(1, drafted, 4) == {"r": 4}
    for _ in range(2):
        payoff.record(1, 4, 5, 25e-3, True)
    assert payoff.draft_lengths(1, drafted, 4) == {"r": 1}


def test_a_slow_start_does_not_stand_for_all_steps() -> None:
    """The first steps with drafts may load kernels, or run before their graphs are captured."""
    drafted = {"r": (4, 0.8)}

    def started(*slow: float) -> Payoff:
        payoff = Payoff()
        for _ in range(2):
            payoff.record(1, 0, 1, 4.2e-3, True)
            payoff.record(1, 1, 2, 5.6e-3, True)
        for seconds in slow:
            payoff.record(1, 4, 4, seconds, True)
        return payoff

    assert started(60e-3, 5.6e-3).draft_lengths(1, drafted, 4) == {"r": 4}
    payoff, asked = started(60e-3, 60e-3), []
    for step in range(500):
        count = sum(payoff.draft_lengths(1, drafted, 4).values())
        asked += [step] * (count == 4)
        payoff.record(1, count, 1 + count, {0: 4.2e-3, 1: 5.6e-3, 4: 60e-3}[count], True)
    assert 4 <= len(asked) <= 8  # twice, less and less often
    for _ in range(1000):
        count = sum(payoff.draft_lengths(1, drafted, 4).values())
        payoff.record(1, count, 1 + count, 5.6e-3 if count else 4.2e-3, True)
    assert payoff.draft_lengths(1, drafted, 4) == {"r": 4}


def test_only_draft_tokens_that_pay_are_computed() -> None:
    payoff = Payoff()
    for _ in range(5):
        payoff.record(2, 0, 2, 0.010, True)
        for count in (3, 5, 10):
            payoff.record(2, count, 4, 0.010 + 0.001 * count, True)  # 1 ms a token, where a step of 10 ms gives two
    lengths = payoff.draft_lengths(2, {"good": (5, 0.9), "bad": (5, 0.15)}, 100)
    assert lengths == {"good": 5}
    assert payoff.draft_lengths(2, {"good": (5, 0.9), "bad": (5, 0.8)}, 3) == {"good": 2, "bad": 1}
    assert Payoff(disable_by_batch_size=4).is_on(3)
    assert not Payoff(disable_by_batch_size=4).is_on(4)


def test_a_step_has_no_more_rows_than_there_is_room_for() -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5, synthetic_acceptance_rate=0.5)
    speculator = Speculator(config, max_rows=10, is_asynchronous=False)
    for num_decodes in (1, 4, 8):  # their plain steps are known
        for _ in range(2):
            speculator.record_step(num_decodes, 0, num_decodes, 0.01, was_on=True)
    sequences = {f"r{i}": ([1, 2], 9) for i in range(4)}
    drafts = speculator.drafts(sequences, 4)
    assert {name: len(draft) for name, draft in drafts.items()} == {"r0": 2, "r1": 2, "r2": 1, "r3": 1}
    assert speculator.drafts(sequences, 8) == {"r0": [2], "r1": [2]}
    assert speculator.drafts(sequences, 10) == {}
    assert len(speculator.drafts({"r0": ([1, 2], 3)}, 1)["r0"]) == 3

"""Where experts go: equal loads of ranks, few moves, and every expert somewhere at any time."""

from __future__ import annotations

import random

import pytest

from compile_and_serve.custom_ops.moe.placement import first_experts, num_slots
from compile_and_serve.custom_ops.moe.turns import TURNS
from compile_and_serve.runtime.engine.expert_balance import ExpertBalancer
from compile_and_serve.runtime.engine.expert_placement import balanced, balanced_turns, imbalance, loads_of_ranks, moves_between
from compile_and_serve.runtime.eplb_config import ExpertBalanceConfig, parse_eplb_config
from compile_and_serve.runtime.scheduler.step_messages import SpreadInfo, step_without_tokens


def skewed(num_experts: int, num_busy: int) -> list[int]:
    """Half of the tokens go to the busy experts, which are neighbours."""
    busy = range(num_experts // 6, num_experts // 6 + num_busy)
    return [10_000 * (num_experts - num_busy) if expert in busy else 10_000 * num_busy for expert in range(num_experts)]


@pytest.mark.parametrize(("num_experts", "num_ranks", "redundant"), [(64, 4, 8), (64, 2, 2), (128, 8, 16), (66, 4, 6), (256, 8, 32)])
def test_skewed_loads_become_even(num_experts: int, num_ranks: int, redundant: int) -> None:
    loads = skewed(num_experts, round(num_experts * 0.05))
    first = first_experts(num_experts, num_slots(num_experts, num_ranks, redundant), num_ranks)
    placement = balanced(loads, first, num_ranks)
    assert set(placement) == set(range(num_experts))
    turns = balanced_turns(loads, placement, num_ranks)
    assert all(len(one) == TURNS for one in turns.values())
    after = loads_of_ranks(loads, placement, turns, num_ranks)
    assert sum(after) == pytest.approx(sum(loads))
    assert imbalance(after) < 1.1 < 1.3 < imbalance(loads_of_ranks(loads, first, {}, num_ranks))


def test_moves_lead_there_and_leave_no_expert_out() -> None:
    draw = random.Random(0)
    for _ in range(50):
        num_ranks = draw.choice([2, 4])
        placement = first_experts(10, num_slots(10, num_ranks, draw.choice([0, 3])), num_ranks)
        target = balanced([draw.random() ** 4 for _ in range(10)], placement, num_ranks)
        moves = list(moves_between(placement, target))
        assert len(moves) <= sum(a != b for a, b in zip(placement, target, strict=True))
        for move in moves:
            assert len(move.copies) <= 2
            placement = move.of(placement)
            assert set(placement) == set(range(10))
        assert placement == target


def test_moves_come_in_small_pieces_once_they_are_worth_it() -> None:
    spread = SpreadInfo(num_ranks=2, placements=[first_experts(8, 5, 2)] * 3, bytes_of_expert=100)
    balancer = ExpertBalancer(ExpertBalanceConfig(window_size=10, step_interval=4, bytes_per_step=250), spread)
    even, busy = [[100] * 8] * 3, [[800, 700, 900, 600, 1, 1, 1, 1]] * 3

    def step(tokens: list[list[int]]) -> int:
        """Bytes that move beside the step."""
        scheduled = step_without_tokens(0, None)
        balancer.begin(scheduled)
        balancer.take(tokens)
        return 0 if scheduled.expert_moves is None else 100 * len(scheduled.expert_moves.copies)

    assert [step(even) for _ in range(7)] == [0] * 7
    assert balancer.num_plans == 1
    assert not balancer.is_moving
    sizes = [step(busy) for _ in range(40)]
    while balancer.is_moving:
        sizes.append(step(busy))
    assert 0 < max(sizes) <= 250
    assert sum(sizes) >= 100 * sum(a != b for one in balancer.placements for a, b in zip(one, spread.placements[0], strict=True)) > 0
    balancer.reset()
    assert balancer.placements == spread.placements


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 3}, "eplb_config has no key steps: known are window_size"),
        ({"step_interval": 0}, "step_interval must be an integer of at least 1, got 0"),
        ({"log_balancedness": 1}, "log_balancedness must be true or false, got 1"),
    ],
)
def test_wrong_options_are_sentences(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_eplb_config(given)


def test_options_are_vllms() -> None:
    found = parse_eplb_config('{"window_size": 5, "num_redundant_experts": 4, "use_async": true, "policy": "default"}')
    assert found == ExpertBalanceConfig(window_size=5, num_redundant_experts=4)

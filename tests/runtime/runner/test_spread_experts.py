"""The tables of experts that move between ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from compile_and_serve.custom_ops.moe.placement import even_turns, num_slots, table_of_rank
from compile_and_serve.custom_ops.moe.turns import TURNS
from compile_and_serve.runtime.engine.expert_placement import balanced, balanced_turns, moves_between
from compile_and_serve.runtime.runner.spread_experts import SpreadExperts, SpreadLayer
from compile_and_serve.runtime.scheduler.step_messages import ExpertMoves

EXPERTS, RANKS = 10, 2


def spread_experts(slots: int) -> SpreadExperts:
    """Of rank 1, with a table alone."""
    spread = object.__new__(SpreadExperts)
    spread._layers = [SpreadLayer(table="table", weights=(), num_experts=EXPERTS, slots=slots)]
    spread._group = SimpleNamespace(rank=1, size=RANKS)  # type: ignore[assignment]
    spread._device, spread._weights = torch.device("cpu"), {"table": torch.zeros(EXPERTS, TURNS, dtype=torch.int32)}  # type: ignore[assignment]
    spread.reset()
    return spread


def test_a_table_names_slots_of_its_experts_after_each_move() -> None:
    draw, slots = random.Random(0), num_slots(EXPERTS, RANKS, 4)
    spread = spread_experts(slots)
    for _ in range(5):
        loads = [draw.random() ** 4 for _ in range(EXPERTS)]
        placement = list(spread._placements[0])
        target = balanced(loads, placement, RANKS)
        for move in moves_between(placement, target):
            spread.apply(ExpertMoves(copies=[(0, slot, source) for slot, source in move.copies]))
            for expert, row in enumerate(spread._turns[0].tolist()):
                assert {spread._placements[0][slot] for slot in row} == {expert}
            assert torch.equal(spread._weights["table"], table_of_rank(spread._turns[0], slots, 1))
        turns = balanced_turns(loads, target, RANKS)
        spread.apply(ExpertMoves(turns=[(0, turns)]))
        expected = even_turns(target, EXPERTS)
        for expert, own in turns.items():
            expected[expert] = torch.tensor(own)
        assert spread._placements[0] == target
        assert torch.equal(spread._turns[0], expected)
        assert torch.equal(spread._weights["table"], table_of_rank(expected, slots, 1))

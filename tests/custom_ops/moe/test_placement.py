"""Experts that are spread over ranks: the ranks' parts add up to what one rank with all experts computes, in every kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from compile_and_serve.custom_ops.moe import adapted_cuda_experts, cuda_experts, triton_experts, triton_gemv_experts, triton_placement
from compile_and_serve.custom_ops.moe.experts import experts, pack_expert_weights
from compile_and_serve.custom_ops.moe.placement import even_turns, first_experts, first_table, num_slots, slots_of_pairs, take_experts
from tests.custom_ops.moe.test_experts import X, operands
from tests.support.numbers import relative_error

RANKS = 2
SLOTS = num_slots(X, RANKS, 2)  # two experts have two slots


def of_rank(args: list[torch.Tensor | None], rank: int) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """The operands of a rank, and its table."""
    own = [take_experts(one, SLOTS, RANKS, rank=rank) if one is not None and at >= 3 else one for at, one in enumerate(args)]
    return own, first_table(torch.empty(1), X, SLOTS, RANKS, rank=rank)


@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("packs", [False, True])
def test_parts_of_ranks_add_up(num_tokens: int, packs: bool) -> None:
    args = operands(num_tokens, "even", torch.float32, biased=True)
    expected = experts(*args)  # type: ignore[arg-type]
    parts = []
    for rank in range(RANKS):
        own, table = of_rank(args, rank)
        own = [pack_expert_weights(one) if packs and at in (3, 4) else one for at, one in enumerate(own)]  # type: ignore[arg-type]
        parts.append(experts(*own, placement_XC=table))  # type: ignore[arg-type]
    assert relative_error(sum(parts), expected.double()) < 1e-6  # type: ignore[arg-type]


METHODS = {
    "gemv": lambda ours: triton_gemv_experts.run_gemv(ours, ours.gate_up),
    "grouped": lambda ours: triton_experts.run_grouped(triton_experts.Tiles(16, 16, 32, 32, 2, 4), ours, ours.gate_up),
    "by linear": lambda ours: adapted_cuda_experts.experts_by_linear(ours, None),
    "chosen": cuda_experts.experts,
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", METHODS)
def test_kernels_skip_the_pairs_of_other_ranks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is not read: memory is filled with NaN."""
    new_empty = torch.Tensor.new_empty
    filled = lambda self, *size, **options: (out := new_empty(self, *size, **options)).fill_(float("nan") if out.is_floating_point() else 0)  # noqa: E731
    args = operands(9, "even", torch.float32, biased=True)
    expected = experts(*args)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    total = torch.zeros_like(expected)
    for rank in range(RANKS):
        own, table = of_rank(args, rank)
        ours = triton_experts.Operands(*own, placement=table)  # type: ignore[arg-type]
        total += METHODS[method](replace(ours, ids_TK=slots_of_pairs(ours.ids_TK, table)))
    assert relative_error(total, expected.double()) < 1e-6


@pytest.mark.parametrize("num_tokens", [0, 1, 700])
def test_tokens_take_turns_with_the_slots_of_an_expert(num_tokens: int) -> None:
    ids = torch.randint(X, (num_tokens, 3), dtype=torch.int32)
    turns = even_turns(first_experts(X, SLOTS, RANKS), X)
    of_ranks = [slots_of_pairs(ids, first_table(ids, X, SLOTS, RANKS, rank=rank)) for rank in range(RANKS)]
    here = [one < SLOTS for one in of_ranks]
    assert torch.equal(here[0], ~here[1])
    physical = torch.where(here[0], of_ranks[0], of_ranks[1] + SLOTS)
    expected = turns[ids.long(), torch.arange(num_tokens)[:, None] % turns.shape[1]]
    assert torch.equal(physical.long(), expected)
    for rank, slots in enumerate(of_ranks):
        on_device = partial(triton_placement.slots_of_pairs, ids)
        assert torch.equal(on_device(first_table(ids, X, SLOTS, RANKS, rank=rank)), slots)

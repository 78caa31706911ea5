"""Which rank has which experts: the table that `cas::experts` reads where experts are spread over ranks.

Each rank has as many slots, and the slots of all ranks are numbered rank by rank. An expert has one slot or more. The tokens take turns
with its slots: token t of a step goes to the one of turn t % C. So an expert's load can be divided among its slots in parts of 1 / C.
The table is a weight of the layer. Moving or copying an expert changes values of the table and of slots, and no graph.

Shape legend: T tokens, K experts of a token, X experts, S slots of a rank, N ranks, C turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compile_and_serve.custom_ops.library import EXPERT_PLACEMENT, EXPERT_SLOTS
from compile_and_serve.custom_ops.mesh import EXPERT
from compile_and_serve.custom_ops.moe.turns import TURNS
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.weight_functions import weight_function


def num_slots(num_experts: int, size: int, num_redundant: int = 0) -> int:
    """Slots of each of `size` ranks: together `num_redundant` more than experts, and a few more where the ranks do not divide them."""
    return -(-(num_experts + num_redundant) // size)


def first_experts(num_experts: int, slots: int, size: int) -> list[int]:
    """The expert of each slot of all ranks at the start: all in order, then the first ones again."""
    return [slot % num_experts for slot in range(slots * size)]


def even_turns(experts: Sequence[int], num_experts: int) -> torch.Tensor:
    """The slot of each turn, if the slots of an expert have equally many turns. experts: of each slot. → int64 [X, C]"""
    slots_of: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(experts):
        slots_of[expert].append(slot)
    return torch.tensor([evenly(slots) for slots in slots_of])


def evenly(slots: Sequence[int]) -> list[int]:
    """The slot of each turn of an expert whose slots have equally many turns."""
    return [slots[turn % len(slots)] for turn in range(TURNS)]


def table_of_rank(slots_XC: torch.Tensor, slots: int, rank: int) -> torch.Tensor:
    """What a rank's table says: the number of a slot among the rank's own, or `slots` for one of another rank. → int32 [X, C]"""
    own_XC = slots_XC - rank * slots
    return torch.where((own_XC >= 0) & (own_XC < slots), own_XC, slots).to(torch.int32)


@weight_function(EXPERT_SLOTS, axis=EXPERT, selects="experts")
def take_experts(weight: torch.Tensor, slots: int, size: int, *, rank: int) -> torch.Tensor:
    """The weights of a rank's slots at the start. [X, …] → [S, …]"""
    num_experts, begin = weight.shape[0], rank * slots % weight.shape[0]
    if begin + slots <= num_experts:
        return weight[begin : begin + slots]
    experts = [(begin + slot) % num_experts for slot in range(slots)]
    return weight[torch.tensor(experts, device=weight.device)]


@weight_function(EXPERT_PLACEMENT, axis=EXPERT)
def first_table(any_weight: torch.Tensor, num_experts: int, slots: int, size: int, *, rank: int) -> torch.Tensor:
    """A rank's table at the start. any_weight: of the layer, for the device. → int32 [X, C]"""
    turns_XC = even_turns(first_experts(num_experts, slots, size), num_experts)
    return table_of_rank(turns_XC, slots, rank).to(any_weight.device)


def slots_of_pairs(ids_TK: torch.Tensor, placement_XC: torch.Tensor) -> torch.Tensor:
    """The rank's slot of each pair, or S for a pair of another rank. ids_TK: experts. placement_XC: int32. → int32 [T, K]"""
    if platform_of(ids_TK.device).runs_cuda_kernels:
        # imported here, because Triton may be missing
        from compile_and_serve.custom_ops.moe.triton_placement import slots_of_pairs as on_cuda

        return on_cuda(ids_TK, placement_XC)
    turn_T = torch.arange(len(ids_TK), device=ids_TK.device) % placement_XC.shape[1]
    return placement_XC[ids_TK.long(), turn_T[:, None]]

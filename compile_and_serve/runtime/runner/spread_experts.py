"""Experts that are spread over the ranks of a stage: what is in a rank's slots, and how experts move between ranks beside steps.

A move changes slots' weights and the layer's table in place, in the order of the device's work, between two steps. Graphs and compiled
pieces stay as they are. Every rank is told every move, in the same order, so that those which send and receive meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.compiler.model import CompiledModel, Model
from compile_and_serve.compiler.passes.expert_parallel import PLACEMENT
from compile_and_serve.compiler.weights.transforms import WeightTransform
from compile_and_serve.custom_ops.collectives.collectives import exchange, rank_group
from compile_and_serve.custom_ops.library import EXPERT_SLOTS
from compile_and_serve.custom_ops.mesh import EXPERT, Mesh
from compile_and_serve.custom_ops.moe.placement import even_turns, evenly, first_experts, table_of_rank
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.weight_functions import Expression
from compile_and_serve.runtime.scheduler.step_messages import ExpertMoves, SpreadInfo


def check_experts(model: Model, mesh: Mesh) -> None:
    """Raise `ValueError` if experts are to be spread over ranks, and the model has none."""
    if mesh.of_axis(EXPERT) == 1 or not isinstance(model, CompiledModel):
        return
    if not any(one.target.endswith(PLACEMENT) for one in model.whole_transforms or model.plan.transforms):
        raise ValueError("enable_expert_parallel is set, but the model has no experts: leave it out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadLayer:
    """One layer: names of its table and of the weights that have an entry for each slot. slots: of a rank."""

    table: str
    weights: tuple[str, ...]
    num_experts: int
    slots: int


def spread_layers(transforms: Sequence[WeightTransform]) -> list[SpreadLayer]:
    """The layers of a plan whose experts are spread over ranks, in their order."""
    found = []
    for one in transforms:
        if not one.target.endswith(PLACEMENT):
            continue
        assert isinstance(one.expression, tuple)
        _, _, num_experts, slots, _ = one.expression
        module = one.target.removesuffix(PLACEMENT).rpartition(".")[0] + "."
        weights = tuple(w.target for w in transforms if w.target.startswith(module) and _has_slots(w.expression))
        found.append(SpreadLayer(table=one.target, weights=weights, num_experts=num_experts, slots=slots))
    return sorted(found, key=lambda layer: [int(part) if part.isdigit() else 0 for part in layer.table.split(".")])


def _has_slots(expression: Expression) -> bool:
    return isinstance(expression, tuple) and (expression[0] == EXPERT_SLOTS or any(map(_has_slots, expression[1:])))


class SpreadExperts:
    """The experts in the slots of all ranks, and a rank's side of their moves."""

    def __init__(self, model: CompiledModel, device: torch.device) -> None:
        self._group, self._device, self._weights = rank_group(EXPERT), device, model.weights
        self._layers = spread_layers(model.plan.transforms)
        self.reset()
        self._rehearse()

    def reset(self) -> None:
        """The weights were loaded: every expert is where it was at the start."""
        self._placements = [first_experts(one.num_experts, one.slots, self._group.size) for one in self._layers]
        self._turns = [even_turns(at, one.num_experts) for one, at in zip(self._layers, self._placements, strict=True)]  # int64 [X, C]

    def info(self) -> SpreadInfo:
        """What the engine is told. Bytes are of the largest layer."""
        sizes = [sum(self._weights[name][0].nbytes for name in layer.weights) for layer in self._layers]
        return SpreadInfo(num_ranks=self._group.size, placements=self._placements, bytes_of_expert=max(sizes, default=0))

    def apply(self, moves: ExpertMoves) -> None:
        """Move experts, all from where they were before. The host waits for it on the CPU only."""
        rank, staged, sends, receives = self._group.rank, [], [], []
        for number, slot, source in moves.copies:
            layer = self._layers[number]
            to, begin = divmod(slot, layer.slots)
            owner, offset = divmod(source, layer.slots)
            if rank not in (to, owner):
                continue
            for name in layer.weights:
                weight = self._weights[name]
                if to == owner:
                    staged.append((weight[begin : begin + 1], weight[offset : offset + 1].clone()))
                elif rank == owner:
                    sends.append((weight[offset : offset + 1], to))
                else:
                    arriving = torch.empty_like(weight[begin : begin + 1])
                    staged.append((weight[begin : begin + 1], arriving))
                    receives.append((arriving, owner))
        if sends or receives:
            exchange(sends, receives, self._group)
        for target, value in staged:
            target.copy_(value)
        self._place(moves)

    def _rehearse(self) -> None:
        """Move experts to where they are, and a slot between each two ranks to nowhere.

        NCCL connects two ranks when they first meet, which takes a tenth of a second, and CUDA loads kernels and takes pinned memory
        when they are first needed, which takes milliseconds: none of that shall happen beside a step.
        """
        rank, size, first = self._group.rank, self._group.size, self._layers[:1]
        self.apply(ExpertMoves(copies=[(0, at * one.slots, at * one.slots) for one in first for at in range(size)]))
        slots = [self._weights[name][:1] for one in first for name in one.weights]
        others = [other for other in range(size) if other != rank]
        sends = [(slot, other) for other in others for slot in slots]
        exchange(sends, [(torch.empty_like(slot), other) for other in others for slot in slots], self._group)

    def _place(self, moves: ExpertMoves) -> None:
        """Write the tables of the layers that the moves change."""
        before = {number: list(self._placements[number]) for number, _, _ in moves.copies}
        changed: dict[int, set[int]] = {number: set() for number in before}  # experts by layer
        for number, slot, source in moves.copies:
            changed[number] |= {before[number][slot], before[number][source]}
            self._placements[number][slot] = before[number][source]
        turns = dict(moves.turns)
        platform = platform_of(self._device)
        for number in sorted({*before, *turns}):
            layer, placement, slots_XC = self._layers[number], self._placements[number], self._turns[number]
            for expert in changed.get(number, ()):
                slots_XC[expert] = torch.tensor(evenly([slot for slot, one in enumerate(placement) if one == expert]))
            for expert, slots in turns.get(number, {}).items():
                slots_XC[expert] = torch.tensor(slots)
            table: np.ndarray = table_of_rank(slots_XC, layer.slots, self._group.rank).numpy()
            self._weights[layer.table].copy_(platform.upload(table))

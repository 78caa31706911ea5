"""Which experts a rank reads, where they are spread over ranks and the checkpoint has a tensor for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compile_and_serve.compiler.weights.transforms import WeightTransform, is_selection, source_of
from compile_and_serve.custom_ops.library import EXPERT_PLACEMENT, EXPERT_SLOTS
from compile_and_serve.custom_ops.mesh import EXPERT, Coordinates
from compile_and_serve.custom_ops.moe.placement import first_experts
from compile_and_serve.custom_ops.weight_functions import Expression, TensorSpec


def own_experts(transforms: Sequence[WeightTransform], specs: Mapping[str, TensorSpec], coordinates: Coordinates) -> dict[str, list[int]]:
    """Stacked tensor of the checkpoint → the expert of each of the rank's slots, for those of which nothing else is used."""
    parts: dict[str, set[Expression]] = {}
    for transform in transforms:
        for part in transform.inputs:
            parts.setdefault(source_of(part), set()).add(part)
    found = {}
    for name, used in parts.items():
        taken = [part for part in used if is_selection(part) and part[0] == EXPERT_SLOTS]
        if len(taken) != 1 or not all(is_selection(part) and part[0] in (EXPERT_SLOTS, EXPERT_PLACEMENT) for part in used):
            continue
        _, _, slots, size = taken[0]
        begin = coordinates.get(EXPERT, 0) * slots
        found[name] = first_experts(specs[name].shape[0], slots, size)[begin : begin + slots]
    return found

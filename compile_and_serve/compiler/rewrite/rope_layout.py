"""Partial and interleaved rotary embeddings in the layout of the fused op, which rotates the pairs (i, i + E/2) of a whole head, and
projections in its layout: all queries, then all keys, then all values.

Scores do not change if the dimensions of queries and keys are permuted alike. So the rows of their weights are permuted once, while the
weights are loaded: first the first dimensions of all rotated pairs and half of the rest, then the second dimensions and the other half.
The rest gets cos = 1 and sin = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import PassContext, tensor_of
from compile_and_serve.custom_ops.weight_functions import weight_function


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which dimensions of a head are rotated together: pairs (i, i + num_pairs), or (2i, 2i + 1) if interleaved."""

    num_pairs: int
    interleaved: bool = False

    def is_plain(self, head_dim: int) -> bool:
        """Whether this is the fused op's own layout."""
        return not self.interleaved and 2 * self.num_pairs == head_dim


@dataclass(frozen=True, slots=True)
class Angles:
    """cos or sin of the angles. node: [T, W]; pairs_are_neighbours: column 2i is pair i's, else column i."""

    node: Node
    pairs_are_neighbours: bool = False


@weight_function("rope_rows")
def _rope_rows(weight: torch.Tensor, head_dim: int, num_rows: int, num_pairs: int, interleaved: int) -> torch.Tensor:
    """The first `num_rows` rows with each head's rows in the fused op's order; the other rows unchanged."""
    order = torch.tensor(order_of_dimensions(head_dim, num_pairs, bool(interleaved)), device=weight.device)
    heads = weight[:num_rows].unflatten(0, (-1, head_dim)).index_select(1, order).flatten(0, 1)
    return torch.cat([heads, weight[num_rows:]])


@weight_function("heads_by_part")
def _heads_by_part(weight: torch.Tensor, num_parts: int, head_dim: int) -> torch.Tensor:
    """Rows of [heads, parts, E] in the order [parts, heads, E]."""
    return weight.unflatten(0, (-1, num_parts, head_dim)).transpose(0, 1).flatten(0, 2)


def heads_by_part(gm: GraphModule, ctx: PassContext, weight: Node, num_parts: int, head_dim: int) -> Node:
    """The weight or bias of a linear whose outputs are [heads, parts, E], with all heads of one part together."""
    return ctx.derived_weight(gm, f"{weight.meta['weight']}.by_part", "heads_by_part", weight, num_parts, head_dim)


def order_of_dimensions(head_dim: int, num_pairs: int, interleaved: bool) -> list[int]:
    """For each dimension of the fused op's order, the class's own dimension."""
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + num_pairs) for i in range(num_pairs)]
    rest = range(2 * num_pairs, head_dim)
    half = len(rest) // 2
    return [first for first, _ in pairs] + list(rest[:half]) + [second for _, second in pairs] + list(rest[half:])


def permuted(gm: GraphModule, ctx: PassContext, weight: Node, rotation: Rotation, head_dim: int, num_rows: int) -> Node:
    """The weight or bias whose first `num_rows` rows are heads of queries and keys, in the fused op's order."""
    name = f"{weight.meta['weight']}.rope"
    constants = (head_dim, num_rows, rotation.num_pairs, int(rotation.interleaved))
    return ctx.derived_weight(gm, name, "rope_rows", weight, *constants)


def whole_head(gm: GraphModule, ctx: PassContext, angles: Angles, rotation: Rotation, head_dim: int, fill: float) -> Node:
    """The angles of a whole head, [T, E], with `fill` where nothing is rotated. Layers share the result."""
    made: dict[tuple[bool, int, int, float], Node] = angles.node.meta.setdefault("rope_whole_head", {})
    key = (angles.pairs_are_neighbours, rotation.num_pairs, head_dim, fill)
    if key not in made:
        last = angles.node
        step = 2 if angles.pairs_are_neighbours else 1
        with gm.graph.inserting_after(last):
            half = last = ctx.call(gm, torch.ops.aten.slice.Tensor, last, 1, 0, step * rotation.num_pairs, step, origin=last)
        if (missing := head_dim // 2 - rotation.num_pairs) > 0:
            with gm.graph.inserting_after(last):
                column = last = ctx.call(gm, torch.ops.aten.slice.Tensor, half, 1, 0, 1, 1, origin=last)
            with gm.graph.inserting_after(last):
                filled = last = ctx.call(gm, torch.full_like, column, fill, origin=last)
            with gm.graph.inserting_after(last):
                rest = last = ctx.call(gm, torch.Tensor.expand, filled, -1, missing, origin=last)
            with gm.graph.inserting_after(last):
                half = last = ctx.call(gm, torch.cat, [half, rest], -1, origin=last)
        with gm.graph.inserting_after(last):
            made[key] = ctx.call(gm, torch.cat, [half, half], -1, origin=last)
    assert tensor_of(made[key]).shape[1] == head_dim
    return made[key]

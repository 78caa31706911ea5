"""The weights that hold LoRA adapters: for each targeted linear one tensor of A and one of B, with a slot for each adapter.

No checkpoint has these weights of the plan: their expressions consist of constants. A compiled model fills them with
zeros, and loading an adapter copies into one slot. Linears that were merged into one share its two tensors. Names and constants say
which linears they are and how they are sharded, so that a stored plan is enough to load adapters.
Embeddings: `embedding_slots.py`. Experts: `expert_slots.py`.

Shape legend: S slots, R the largest rank, P merged linears, I and O input and output features (a rank's share where they are sharded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from compile_and_serve.compiler.weights.transforms import WeightTransform, evaluate
from compile_and_serve.custom_ops.library import COLUMNS as SHARE_OF_COLUMNS
from compile_and_serve.custom_ops.library import ROWS, SHARE_OF_PARTS
from compile_and_serve.custom_ops.lora.limits import COLUMNS
from compile_and_serve.custom_ops.mesh import Coordinates
from compile_and_serve.custom_ops.weight_functions import Expression, weight_function

A, B = ".lora_a", ".lora_b"

ROPE_ROWS = "adapter_rope_rows"  # B of queries, keys and values whose rows `fuse_rope_attention` permutes


@weight_function(ROPE_ROWS)
def _as_it_is(slots: torch.Tensor, *_: int) -> torch.Tensor:
    """Slots whose adapters are permuted when they are loaded: see `LinearSite.order`."""
    return slots


@weight_function("adapter_slots")
def _zeros(*sizes: Any) -> torch.Tensor:
    """Slots of A. sizes: its three dimensions, then what `LinearSite` says, which does not matter here, and the dtype."""
    return torch.zeros(sizes[:3], dtype=sizes[-1])


@weight_function("adapter_blocks")
def _zero_blocks(num_slots: int, rank: int, out_features: int, *others: Any) -> torch.Tensor:
    """Slots of B. others: as of `_zeros`."""
    return torch.zeros(num_slots, -(-out_features // COLUMNS), rank, COLUMNS, dtype=others[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotWeights:
    """A linear's two weights of slots: names, and expressions of A [S, P * R, I] and B [S, ceil(O / 16), R, 16]."""

    a: str
    b: str
    of_a: Expression
    of_b: Expression


def slot_weights(
    num_slots: int, rank: int, in_features: int, parts: Sequence[tuple[str, int, int, Expression]], dtype: torch.dtype
) -> SlotWeights:
    """parts: of each merged linear its module, its output features here and of all ranks together, and its weight's expression."""
    columns = {base[-1] if is_sharded(base, SHARE_OF_COLUMNS) else 0 for *_, base in parts}
    assert len(columns) == 1, "linears that were merged are sharded alike"
    constants: list[int] = []
    for _, out_features, whole, base in parts:
        share = base[2:] if is_sharded(base, ROWS) or is_sharded(base, SHARE_OF_PARTS) else ()
        constants += [out_features, whole, len(share), *share]
    name = "+".join(module for module, *_ in parts)
    return SlotWeights(
        a=name + A,
        b=name + B,
        of_a=("adapter_slots", num_slots, len(parts) * rank, in_features, columns.pop(), dtype),
        of_b=("adapter_blocks", num_slots, rank, sum(out_features for _, out_features, *_ in parts), *constants, dtype),
    )


def is_sharded(base: Expression, how: str) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(base, tuple) and base[0] == how


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSite:
    """A linear that adapters can change.

    module: its name. in_features, out_features: of the whole linear. a, b: names of the model's weights. first_row: of its A in a slot.
    columns: of its B in a slot. order: (head_dim, num_rows, num_pairs, interleaved) of `rope_rows`, if the linear's rows are permuted by
    it. ranks_of_inputs: that share the input features; 0: not sharded. share_of_outputs: what `shard_rows`, or `shard_parts` if there are
    more than two, says about the output features; (): not sharded.
    """

    module: str
    in_features: int
    out_features: int
    a: str
    b: str
    first_row: int
    columns: slice
    ranks_of_inputs: int
    share_of_outputs: tuple[int, ...]
    order: tuple[int, ...] = ()

    def fill(self, slot_a: torch.Tensor, slot_b: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, coordinates: Coordinates) -> None:
        """Copy a rank's share of an adapter's A [R, I] and B [O, R] into a slot of the two weights."""
        if self.ranks_of_inputs:
            a_RI = evaluate((SHARE_OF_COLUMNS, "a", self.ranks_of_inputs), {"a": a_RI}, coordinates)
        if self.share_of_outputs:
            function = ROWS if len(self.share_of_outputs) == 2 else SHARE_OF_PARTS
            b_OR = evaluate((function, "b", *self.share_of_outputs), {"b": b_OR}, coordinates)
        if self.order and self.columns.stop <= self.order[1]:
            b_OR = evaluate(("rope_rows", "b", self.order[0], len(b_OR), *self.order[2:]), {"b": b_OR}, coordinates)
        slot_a[self.first_row : self.first_row + len(a_RI)].copy_(a_RI)
        fill_columns(slot_b, b_OR, self.columns.start)


def fill_columns(slot_b: torch.Tensor, b_OR: torch.Tensor, first: int) -> None:
    """Copy B [O, R] into the outputs from `first` on of a slot [C, largest R, 16]."""
    num_columns, rank = b_OR.shape
    if first % COLUMNS == num_columns % COLUMNS == 0:  # whole blocks, in one copy
        blocks = slice(first // COLUMNS, (first + num_columns) // COLUMNS)
        slot_b[blocks, :rank].copy_(b_OR.unflatten(0, (-1, COLUMNS)).transpose(1, 2))
        return
    columns = torch.arange(first, first + num_columns)
    slot_b[columns // COLUMNS, :rank, columns % COLUMNS] = b_OR.to(slot_b.dtype)


def linear_sites(transforms: Sequence[WeightTransform]) -> list[LinearSite]:
    """The linears of a plan that adapters can change, in the plan's order."""
    slots = {one.target: one.expression for one in transforms if one.target.endswith((A, B)) and not one.sources}
    sites = []
    for target, of_a in slots.items():
        if not target.endswith(A):
            continue
        name = target.removesuffix(A)
        of_b = slots[name + B]
        assert isinstance(of_a, tuple)
        assert isinstance(of_b, tuple)
        order: tuple[int, ...] = ()
        if of_b[0] == ROPE_ROWS:
            of_b, order = of_b[1], of_b[2:]
        rank, constants, begin = of_b[2], list(of_b[4:-1]), 0
        for part, module in enumerate(name.split("+")):
            columns, whole, count, *constants = constants
            share, constants = constants[:count], constants[count:]
            sites.append(
                LinearSite(
                    module=module,
                    in_features=of_a[3] * (of_a[4] or 1),
                    out_features=whole,
                    a=target,
                    b=name + B,
                    first_row=part * rank,
                    columns=slice(begin, begin + columns),
                    ranks_of_inputs=of_a[4],
                    share_of_outputs=tuple(share),
                    order=order,
                )
            )
            begin += columns
    return sites

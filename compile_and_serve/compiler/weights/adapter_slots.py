"""The weights that hold LoRA adapters: for each targeted linear one tensor of A and one of B, with a slot for each adapter.

They are weights of the plan that no checkpoint has: their expressions have constants alone. A compiled model fills them with
zeros, and loading an adapter copies into one slot. A sharded linear's slots say how they are sharded, so that a stored plan is
enough to load adapters.

Shape legend: S slots, R the largest rank, I and O input and output features (a rank's share where they are sharded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from compile_and_serve.compiler.weights.transforms import Expression, WeightTransform, evaluate, weight_function

A, B = ".lora_a", ".lora_b"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _zeros(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """sizes: the three dimensions, then how they are sharded, which does not matter here."""
    return torch.zeros(sizes[:3], dtype=dtype)


for _dtype in _DTYPES:
    weight_function(f"adapter_slots_{str(_dtype).removeprefix('torch.')}")(partial(_zeros, dtype=_dtype))


def slot_expressions(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, base: Expression
) -> tuple[Expression, Expression]:
    """Expressions of a linear's A [S, R, I] and B [S, O, R]. sizes: S, R, I, O. base: the expression of the linear's weight."""
    num_slots, rank, in_features, out_features = sizes
    function = f"adapter_slots_{str(dtype).removeprefix('torch.')}"
    split = base[0] if isinstance(base, tuple) else None
    shards_a = base[-1] if split == "shard_columns" and isinstance(base, tuple) else 0
    shards_b = base[-2:] if split == "shard_rows" and isinstance(base, tuple) else (0, 0)
    return (
        (function, num_slots, rank, in_features, shards_a),
        (function, num_slots, out_features, rank, *shards_b),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSite:
    """A linear that adapters can change.

    module: its name. in_features, out_features: of the whole linear. a, b: names of the model's weights. shards: ranks that share
    the input features, the number of different parts of the output features, and ranks that share these; 0: not sharded.
    """

    module: str
    in_features: int
    out_features: int
    shards: tuple[int, int, int]

    @property
    def a(self) -> str:
        return self.module + A

    @property
    def b(self) -> str:
        return self.module + B

    def a_of_rank(self, a_RI: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's columns of A."""
        size = self.shards[0]
        return evaluate(("shard_columns", "a", size), {"a": a_RI}, rank) if size else a_RI

    def b_of_rank(self, b_OR: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's rows of B."""
        _, parts, size = self.shards
        return evaluate(("shard_rows", "b", parts, size), {"b": b_OR}, rank) if size else b_OR


def adapter_sites(transforms: Sequence[WeightTransform]) -> tuple[AdapterSite, ...]:
    """The linears of a plan that adapters can change, in the plan's order."""
    slots = {one.target: one.expression for one in transforms if one.target.endswith((A, B)) and not one.sources}
    sites = []
    for target, of_a in slots.items():
        if not target.endswith(A):
            continue
        module = target.removesuffix(A)
        of_b = slots[module + B]
        assert isinstance(of_a, tuple)
        assert isinstance(of_b, tuple)
        shards = (of_a[4], of_b[4], of_b[5])
        sites.append(
            AdapterSite(
                module=module, in_features=of_a[3] * (shards[0] or 1), out_features=of_b[2] * (shards[1] or 1), shards=shards
            )
        )  # fmt: skip
    return tuple(sites)

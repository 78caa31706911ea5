"""The weights that hold the LoRA adapters of experts, with a slot for each adapter (`adapter_slots.py`).

A slot has every expert's A and B, in the layouts of `custom_ops/moe/expert_adapters.py`. Adapters come for one expert's gate, up or
down, or for a stacked weight of all experts. One of gate and up together has one A for both, which is copied.

Shape legend: S slots, X experts, R the largest rank, r an adapter's own, P parts (gate and up: 2, down: 1), I and O input and output
features of a stacked weight (a rank's share where they are sharded), C blocks of N = 16 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compile_and_serve.compiler.weights.adapter_slots import is_sharded
from compile_and_serve.compiler.weights.transforms import WeightTransform, evaluate
from compile_and_serve.custom_ops.library import EXPERT_COLUMNS, EXPERT_ROWS
from compile_and_serve.custom_ops.lora.limits import COLUMNS
from compile_and_serve.custom_ops.mesh import TENSOR, Coordinates
from compile_and_serve.custom_ops.weight_functions import Expression, weight_function

A, B = ".experts_lora_a", ".experts_lora_b"


@weight_function("expert_adapters_a")
def _zeros_a(num_slots: int, num_experts: int, rows: int, inputs: int, by_columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_slots, num_experts, rows, inputs, dtype=dtype)


@weight_function("expert_adapters_b")
def _zeros_b(num_slots: int, num_experts: int, rank: int, outputs: int, by_rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_slots, num_experts, -(-outputs // COLUMNS), rank, COLUMNS, dtype=dtype)


def expert_slots(
    parameter: str, num_slots: int, rank: int, shape: Sequence[int], parts: int, base: Expression, dtype: torch.dtype
) -> tuple[tuple[str, Expression], tuple[str, Expression]]:
    """Names and expressions of A [S, X, P * R, I] and B [S, X, C, R, N] of a stacked weight [X, O, I] with the expression `base`."""
    num_experts, outputs, inputs = shape
    columns, rows = (base[-1] if is_sharded(base, how) else 0 for how in (EXPERT_COLUMNS, EXPERT_ROWS))
    return (
        (parameter + A, ("expert_adapters_a", num_slots, num_experts, parts * rank, inputs, columns, dtype)),
        (parameter + B, ("expert_adapters_b", num_slots, num_experts, rank, outputs, rows, dtype)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSite:
    """A stacked weight of experts that adapters can change.

    module: the parameter's name. in_features, out_features: of the whole matrix of an expert. parts: 2 for gate and up. by_columns,
    by_rows: ranks that share its input features, and the output features of each part; 0: not sharded.
    """

    module: str
    num_experts: int
    in_features: int
    out_features: int
    a: str
    b: str
    parts: int
    by_columns: int
    by_rows: int

    def fill(
        self,
        slot_a: torch.Tensor,
        slot_b: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        coordinates: Coordinates,
        expert: int | None = None,
        first_row: int = 0,
    ) -> None:
        """Copy a rank's share of an adapter into a slot of the two weights.

        expert: a [r, I] and b [rows, r] are of this expert's outputs from `first_row` on. None: as PEFT has them for all experts
        together, a [X * r, I] with an expert's rows side by side, b [rows, r * X] with a column of each expert side by side.
        """
        if expert is None:
            a_XRI = a.unflatten(0, (self.num_experts, -1))
            b_XOR = b.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
            experts = slice(None)
        else:
            a_XRI, b_XOR, experts = a[None], b[None], slice(expert, expert + 1)
        if self.by_columns:
            a_XRI = evaluate((EXPERT_COLUMNS, "a", self.by_columns), {"a": a_XRI}, coordinates)
        whole = self.out_features // self.parts
        largest_rank, own_rank = slot_a.shape[1] // self.parts, a_XRI.shape[1]
        for part in range(first_row // whole, (first_row + b_XOR.shape[1]) // whole):
            slot_a[experts, part * largest_rank : part * largest_rank + own_rank] = a_XRI.to(slot_a.dtype)
            begin = part * whole - first_row
            own_XOR = b_XOR[:, begin : begin + whole]
            if self.by_rows:
                own_XOR = own_XOR.chunk(self.by_rows, dim=1)[coordinates.get(TENSOR, 0)]
            columns = part * own_XOR.shape[1] + torch.arange(own_XOR.shape[1])
            # The indexed dimensions come first: [columns, experts, ranks].
            values = own_XOR.permute(1, 0, 2).to(slot_b.dtype)
            slot_b[experts, columns // COLUMNS, :own_rank, columns % COLUMNS] = values


def expert_sites(transforms: Sequence[WeightTransform]) -> list[ExpertSite]:
    """The stacked weights of a plan that adapters can change."""
    of = {one.target: one.expression for one in transforms if not one.sources}
    sites = []
    for target, of_a in of.items():
        if not target.endswith(A):
            continue
        parameter = target.removesuffix(A)
        of_b = of[parameter + B]
        assert isinstance(of_a, tuple)
        assert isinstance(of_b, tuple)
        _, _, num_experts, rows, inputs, by_columns, _ = of_a
        _, _, _, rank, outputs, by_rows, _ = of_b
        sites.append(
            ExpertSite(
                module=parameter,
                num_experts=num_experts,
                in_features=inputs * (by_columns or 1),
                out_features=outputs * (by_rows or 1),
                a=target,
                b=parameter + B,
                parts=rows // rank,
                by_columns=by_columns,
                by_rows=by_rows,
            )
        )
    return sites

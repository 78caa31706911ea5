"""An op from outside of the package: the second half of a gated MLP, with all that the compiler must know of it.

Shape legend: T tokens, F intermediate size, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import COLUMNS, ROWS, Sharding, define

STEP = 2.0**-6  # the gated values are rounded to multiples of it


def _exact(gate_TF: torch.Tensor, up_TF: torch.Tensor, scale_F: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate_TF) * up_TF * scale_F) @ weight_DF.T


def _reference(gate_TF: torch.Tensor, up_TF: torch.Tensor, scale_F: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
    """(round(silu(gate) · up · scale / STEP) · STEP) Wᵀ"""
    return ((F.silu(gate_TF) * up_TF * scale_F / STEP).round() * STEP) @ weight_DF.T


def _kernel(gate_TF: torch.Tensor, up_TF: torch.Tensor, scale_F: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
    assert gate_TF.dtype == torch.float32, "the kernel takes float32 only"
    return torch.stack([_reference(gate_F, up_F, scale_F, weight_DF) for gate_F, up_F in zip(gate_TF, up_TF, strict=True)])


ROUNDED_DOWN = define(
    "test_rounded_down(Tensor gate, Tensor up, Tensor scale, Tensor weight) -> Tensor",
    version=1,
    fake=lambda gate_TF, up_TF, scale_F, weight_DF: gate_TF.new_empty(gate_TF.shape[0], weight_DF.shape[0]),
    reference=_reference,
    exact=_exact,
    sharding=Sharding(inputs={"gate": 1, "up": 1}, output=None, weights={"scale": ROWS, "weight": COLUMNS}),
    row_wise=True,
    flops=lambda gate_TF, up_TF, scale_F, weight_DF: 2 * gate_TF.shape[0] * weight_DF.numel(),
    CPU=_kernel,
)

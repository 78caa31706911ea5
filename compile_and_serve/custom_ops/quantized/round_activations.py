"""`cas::round_activations`: 8-bit activations before a linear whose kernel takes wider ones (4-bit weights with 8-bit activations).

Shape legend: T tokens, I input features.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.quantization import quantize_activations


def _round_activations(x_TI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    quantized_TI, scale_T1 = quantize_activations(x_TI, dtype)
    return (quantized_TI.to(scale_T1.dtype) * scale_T1).to(x_TI.dtype)


ROUND_ACTIVATIONS = define(
    "round_activations(Tensor x, ScalarType dtype) -> Tensor",
    version=1,
    fake=lambda x_TI, dtype: torch.empty_like(x_TI),
    reference=_round_activations,
    exact=lambda x_TI, dtype: x_TI.clone(),
)


def round_activations(x_TI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q(x) · scale, where q is `quantize_activations` with one scale per token. x_TI: [T, I] → [T, I], rounded to x's dtype

    dtype: int8 or float8_e4m3fn.
    """
    return ROUND_ACTIVATIONS(x_TI, dtype)

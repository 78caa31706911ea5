"""`cas::lora_linear`: `cas::fused_linear` with the contribution of each token's LoRA adapter, before SiLU-mul and residual.

Shape legend: T tokens, I and O input and output features, S adapter slots, R the largest rank, P merged linears, Q = P · R,
C blocks of N = 16 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.linear.fused_linear import fake_linear, finish_linear, unpack_linear_weight
from compile_and_serve.custom_ops.lora.lora_add import check_adapters
from compile_and_serve.custom_ops.lora.lora_add import lora_add as _add


def _lora_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
    gelu: bool,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None = None,
) -> torch.Tensor:
    if norm_weight_I is not None:
        x_TI = F.rms_norm(x_TI, (x_TI.shape[1],), norm_weight_I, eps)
    y_TO = F.linear(x_TI, unpack_linear_weight(packed, out_features, x_TI.shape[1]), bias_O)
    y_TO = _add(y_TO, x_TI, a_SQI, b_SCRN, index_T, ends, groups_T4)
    return finish_linear(y_TO, silu_mul, residual_TO, x_TI.dtype, gelu)


def _fake(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, *others: Any) -> torch.Tensor:
    a_SQI, b_SCRN, _, ends = others[6:10]
    check_adapters(out_features, x_TI, a_SQI, b_SCRN, ends)
    return fake_linear(x_TI, out_features, *others)


def _lora_linear_cuda(*args: Any) -> torch.Tensor:
    from compile_and_serve.custom_ops.lora.triton_lora import lora_linear as triton_lora_linear  # Triton may be missing

    return triton_lora_linear(*args)


LORA_LINEAR = define(
    "lora_linear(Tensor x, Tensor packed, int out_features, Tensor? norm_weight, float eps, Tensor? bias, bool silu_mul, Tensor? residual, "
    "bool gelu, Tensor a, Tensor b, Tensor adapter_index, int[] ends, Tensor? groups=None) -> Tensor",
    version=1,
    fake=_fake,
    reference=_lora_linear,
    CUDA=_lora_linear_cuda,
)


def lora_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
    gelu: bool,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = f(lora_add(n Wᵀ + bias, n, …)) + residual with n = rms_norm(x). Everything but the products is optional.

    The first nine arguments are those of `fused_linear`, the others those of `lora_add`. → as `fused_linear`.
    """
    linear = (x_TI, packed, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu)
    return LORA_LINEAR(*linear, a_SQI, b_SCRN, index_T, ends, groups_T4)

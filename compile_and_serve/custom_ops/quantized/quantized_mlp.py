"""`cas::quantized_mlp`: two quantized linears with SiLU-mul between them, so that what lies between them may stay rounded.

Shape legend: T tokens, I input features, N inner features (of gate, and of up), O output features, G groups of 128 inputs.

Where both linears are matrix products of a library, as they are for many tokens on CUDA, one kernel takes SiLU-mul and rounds it for
the second: the inner activations never travel through memory in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.quantized.quantization import Activations, Rounded
from compile_and_serve.custom_ops.quantized.quantized_linear import cuda_unsupported_reason, exact_quantized_linear


def _quantized_mlp_as(linear: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    (
        x, gate_up, gate_up_scale, inner_features, norm_weight, eps, gate_up_bias, gate_up_input_scale,
        down, down_scale, out_features, down_bias, residual, down_input_scale, activations, *rounded,
    ) = arguments  # fmt: skip
    inner = linear(
        x, gate_up, gate_up_scale, 2 * inner_features, norm_weight, eps, gate_up_bias, True, None, activations, gate_up_input_scale,
        *rounded,
    )  # fmt: skip
    return linear(
        inner, down, down_scale, out_features, None, eps, down_bias, False, residual, activations, down_input_scale
    )


def _quantized_mlp(*arguments: Any) -> torch.Tensor:
    return _quantized_mlp_as(torch.ops.cas.quantized_linear.default, *arguments)


def exact_quantized_mlp(*arguments: Any) -> torch.Tensor:
    """`quantized_mlp` in plain torch, but activations are not rounded: what verification compares."""
    return _quantized_mlp_as(exact_quantized_linear, *arguments)


def _quantized_mlp_cuda(*arguments: Any) -> torch.Tensor:
    from compile_and_serve.custom_ops.quantized.cuda_linear import quantized_mlp as quantized_mlp_cuda

    gate_up = arguments[1]
    if cuda_unsupported_reason(gate_up.device, gate_up.dtype) is not None:
        return _quantized_mlp(*arguments)
    return quantized_mlp_cuda(*arguments)


def _quantized_mlp_fake(x_TI: torch.Tensor, *arguments: Any) -> torch.Tensor:
    out_features = arguments[9]
    return x_TI.new_empty(x_TI.shape[0], out_features)


_quantized_mlp_op = define(
    "quantized_mlp(Tensor x, Tensor gate_up, Tensor gate_up_scale, int inner_features, Tensor? norm_weight, float eps, "
    "Tensor? gate_up_bias, Tensor? gate_up_input_scale, Tensor down, Tensor down_scale, int out_features, Tensor? down_bias, "
    "Tensor? residual, Tensor? down_input_scale, str activations, Tensor? rounded=None, Tensor? rounded_scale=None) -> Tensor",
    kind=OpKind.CAPTURABLE,
    version=2,
    fake=_quantized_mlp_fake,
    CompositeExplicitAutograd=_quantized_mlp,
    CUDA=_quantized_mlp_cuda,
)


def quantized_mlp(
    x_TI: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    inner_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    gate_up_bias: torch.Tensor | None,
    gate_up_input_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    out_features: int,
    down_bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    down_input_scale: torch.Tensor | None,
    activations: Activations,
    rounded: Rounded | None = None,
) -> torch.Tensor:
    """out = down(silu(gate) · up) + residual, with gate and up the halves of gate_up(rms_norm(x)); see `quantized_linear`.

    x_TI: [T, I], rows may be strided; gate_up: packed [2 * N, I]; down: packed [O, N]; scales: float32, per output or per block;
    inner_features: N; out_features: O; norm_weight_I: [I]; biases: [2 * N] and [O]; residual_TO: [T, O]; input scales: float32, one
    value each, with static activations; activations: of both linears; rounded: as there, of x. → [T, O], contiguous, in x's dtype.
    Rounded where the two linears would round, SiLU-mul to x's dtype first.
    """
    return _quantized_mlp_op(
        x_TI, gate_up, gate_up_scale, inner_features, norm_weight_I, eps, gate_up_bias, gate_up_input_scale,
        down, down_scale, out_features, down_bias_O, residual_TO, down_input_scale, activations, *(rounded or (None, None)),
    )  # fmt: skip

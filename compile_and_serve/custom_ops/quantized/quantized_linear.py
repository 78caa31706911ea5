"""`cas::quantized_linear`: `cas::fused_linear` over an 8-bit weight.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.

The weight is float8_e4m3fn or int8, with a float32 scale per output [O] or per block of 128 × 128 [ceil(O / 128), ceil(I / 128)].
Activations:
- "none": x is not quantized (weight-only);
- "dynamic": x is quantized to the weight's dtype, with a scale per token from its largest value (per token and group of 128 inputs, if the
  weight has scales per block);
- "static": x is quantized with one scale, `input_scale`, from the checkpoint.

Layouts: plain [O, I], or packed for a kernel (`pack_quantized_weight`). A packed weight is never two-dimensional.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.linear.fused_linear import fake_linear, finish_linear
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import Activations, Quantized, dtype_name, expand_scale, quantize_activations
from compile_and_serve.custom_ops.quantized.arguments import check_arguments, pair_of
from compile_and_serve.custom_ops.quantized.cpu_layout import cpu_unsupported_reason, pack_weight_cpu, unpack_weight_cpu
from compile_and_serve.custom_ops.weight_functions import weight_function

log = logging.getLogger(__name__)


def quantized_linear_unsupported_reason(
    *, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, per_block: bool
) -> str | None:
    """None when `quantized_linear` has a kernel for this combination, else the reason in one sentence. (The op itself runs anywhere.)

    dtype: of the activations. per_block: whether the weight has scales per block.
    """
    platform = platform_of(device)
    if platform.runs_cuda_kernels:
        return cuda_unsupported_reason(device, weight_dtype)
    if not platform.runs_cpp_kernels:
        return f"there is no kernel for {dtype_name(weight_dtype)} weights on {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU kernel takes bfloat16 and float32, not {dtype}"
    return cpu_unsupported_reason(weight_dtype=weight_dtype, per_block=per_block)


@cache
def cuda_unsupported_reason(device: torch.device, weight_dtype: torch.dtype) -> str | None:
    """None when the CUDA kernels take weights of this dtype on this device, else the reason in one sentence."""
    platform = platform_of(device)
    if not platform.computes_in(weight_dtype):
        return f"float8 needs compute capability 8.9 or newer, {platform.name} is older"
    return None


@weight_function("pack_quantized_weight")
def pack_quantized_weight(quantized_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight in the layout of `quantized_linear` on its device; the same tensor where that is the plain layout.

    quantized_OI: float8_e4m3fn or int8 [O, I]; scale: float32 [O] or [ceil(O / 128), ceil(I / 128)].
    """
    if not platform_of(quantized_OI.device).runs_cpp_kernels:
        return quantized_OI
    reason = cpu_unsupported_reason(weight_dtype=quantized_OI.dtype, per_block=scale.dim() == 2, in_features=quantized_OI.shape[1])
    if reason is None:
        return pack_weight_cpu(quantized_OI)
    _warn_slow(reason)
    return quantized_OI


def unpack_quantized_weight(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_quantized_weight`. → float8_e4m3fn or int8 [out_features, in_features]"""
    return packed if packed.dim() == 2 else unpack_weight_cpu(packed, out_features, in_features)


def quantized_linear_reference(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    activations: str = "none",
    input_scale: torch.Tensor | None = None,
    quantized_TI: torch.Tensor | None = None,
    quantized_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quantized_linear` in plain torch, over a plain or packed weight."""
    quantized = pair_of(quantized_TI, quantized_scale)
    check_arguments(packed, scale, activations, input_scale, quantized)
    weight_OI = unpack_quantized_weight(packed, out_features, x_TI.shape[1])
    dtype, math_dtype = x_TI.dtype, torch.promote_types(x_TI.dtype, torch.float32)
    if norm_weight_I is not None:
        x_TI = F.rms_norm(x_TI, (x_TI.shape[1],), norm_weight_I, eps)
    per_block = scale.dim() == 2
    x_scale = None
    if quantized is not None:
        x_TI, x_scale = quantized
    elif activations != "none":
        x_TI, x_scale = quantize_activations(x_TI, packed.dtype, per_group=per_block, input_scale=input_scale)
    # Products of two 8-bit values are exact in float32; only the sums are rounded.
    x_TI, weight_OI = x_TI.to(math_dtype), weight_OI.to(math_dtype)
    if per_block:
        if x_scale is not None:
            x_TI = x_TI * x_scale.repeat_interleave(128, 1)[:, : x_TI.shape[1]]
        y_TO = x_TI @ (weight_OI * expand_scale(scale, weight_OI.shape)).T
    else:
        y_TO = (x_TI @ weight_OI.T) * scale
        if x_scale is not None:
            y_TO = y_TO * x_scale
    if bias_O is not None:
        y_TO = y_TO + bias_O
    return finish_linear(y_TO, silu_mul, residual_TO, dtype)


def _exact_quantized_linear(x_TI: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, out_features: int, *args: Any) -> torch.Tensor:
    """`quantized_linear` in plain torch without quantizing x, for the verification of passes. All arguments are positional."""
    norm_weight, eps, bias, silu_mul, residual, *_ = args
    plain_OI = unpack_quantized_weight(packed, out_features, x_TI.shape[1])
    return quantized_linear_reference(x_TI, plain_OI, scale, out_features, norm_weight, eps, bias, silu_mul, residual)


def _quantized_linear_fake(x_TI: Any, packed: Any, scale: Any, out_features: int, *others: Any) -> torch.Tensor:
    return fake_linear(x_TI, out_features, *others)


def _quantized_linear_slowly(x_TI: torch.Tensor, packed: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    platform = platform_of(x_TI.device)
    if not platform.runs_cpp_kernels:  # on the CPU, packing the weight has warned
        reason = cuda_unsupported_reason(packed.device, packed.dtype) if platform.runs_cuda_kernels else None
        _warn_slow(reason or f"there is no kernel for {dtype_name(packed.dtype)} weights on {x_TI.device.type}")
    return quantized_linear_reference(x_TI, packed, *args, **kwargs)


def _quantized_linear_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    # imported here, because Triton may be missing
    from compile_and_serve.custom_ops.quantized.cuda_linear import quantized_linear as quantized_linear_cuda

    if cuda_unsupported_reason(args[1].device, args[1].dtype) is not None:
        return _quantized_linear_slowly(*args, **kwargs)
    return quantized_linear_cuda(*args, **kwargs)


@cache
def _warn_slow(reason: str) -> None:
    log.warning("The slow torch reference of quantized linears runs: %s", reason)


QUANTIZED_LINEAR = define(
    "quantized_linear(Tensor x, Tensor packed, Tensor scale, int out_features, Tensor? norm_weight=None, float eps=1e-6, "
    'Tensor? bias=None, bool silu_mul=False, Tensor? residual=None, str activations="none", Tensor? input_scale=None, '
    "Tensor? quantized=None, Tensor? quantized_scale=None) -> Tensor",
    version=5,
    fake=_quantized_linear_fake,
    reference=quantized_linear_reference,
    exact=_exact_quantized_linear,
    CompositeExplicitAutograd=_quantized_linear_slowly,
    CUDA=_quantized_linear_cuda,
)


def quantized_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    activations: Activations = "none",
    input_scale: torch.Tensor | None = None,
    quantized: Quantized | None = None,
) -> torch.Tensor:
    """out = f(q(rms_norm(x)) (scale · Q)ᵀ + bias) + residual, where f is silu(first half) · second half with silu_mul.

    x_TI: [T, I], rows may be strided; packed: `pack_quantized_weight(Q [O, I], scale)`; scale: float32 [O], or
    [ceil(O / 128), ceil(I / 128)]; out_features: O; norm_weight_I: [I]; bias_O: [O]; residual_TO: [T, O] (with silu_mul:
    [T, O / 2]); input_scale: float32, one value; quantized: q(rms_norm(x)) and its scales, if they are already known.
    → [T, O], or [T, O / 2] with silu_mul, contiguous, in x's dtype.

    q is `quantize_activations`, after rounding the normalized x to x's dtype. Products are summed in float32 (of int8 activations in
    int32, but in float32 by the reference and for one token on CUDA). The scales multiply the sums in float32, and the output is rounded
    once to x's dtype. A library's product on CUDA also rounds before bias, SiLU-mul, and a residual that CUTLASS does not add itself.
    """
    return QUANTIZED_LINEAR(
        x_TI,
        packed,
        scale,
        out_features,
        norm_weight_I,
        eps,
        bias_O,
        silu_mul,
        residual_TO,
        activations,
        input_scale,
        *(quantized or (None, None)),
    )

"""`cas::quantized_linear`: `cas::fused_linear`'s contract over a weight of 8 bits a value.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.

The weight is float8_e4m3fn or int8 (its tensor's dtype says which) with a float32 scale per output [O], or per block of 128 × 128
[ceil(O / 128), ceil(I / 128)]. What is multiplied with it:
- activations "none": x as it is (weight-only);
- "dynamic": x rounded to the weight's dtype with a scale a token (or a token and group of 128 inputs, where the weight's scale is
  per block), made of its largest value;
- "static": x rounded with one scale for all, `input_scale`, that a checkpoint brings.

Layouts: plain [O, I], or what a kernel's own packing makes of it (`pack_quantized_weight`); a packed weight is never two-dimensional.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.linear.fused_linear import finish_linear
from compile_and_serve.custom_ops.quantization import (
    Activations,
    Rounded,
    expand_scale,
    quantize_activations,
)
from compile_and_serve.custom_ops.quantized.arguments import check_arguments, pair_of, reads_rounded
from compile_and_serve.custom_ops.quantized.cpu_layout import cpu_unsupported_reason, pack_weight_cpu, unpack_weight_cpu

log = logging.getLogger(__name__)


def quantized_linear_unsupported_reason(
    *, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, per_block: bool
) -> str | None:
    """None when `quantized_linear` has a kernel for this combination, else one sentence why not (the op itself runs anywhere).

    dtype: of the activations. per_block: whether the weight's scale is per block.
    """
    if device.type == "cuda":
        return cuda_unsupported_reason(device, weight_dtype)
    if device.type != "cpu":
        return f"there is no kernel for {_name(weight_dtype)} weights on {device.type}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU kernel takes bfloat16 and float32, not {dtype}"
    return cpu_unsupported_reason(weight_dtype=weight_dtype, per_block=per_block)


@cache
def cuda_unsupported_reason(device: torch.device, weight_dtype: torch.dtype) -> str | None:
    """None when the CUDA kernels take weights of this dtype on this device, else one sentence why not."""
    if weight_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        return f"float8 needs compute capability 8.9 or newer, {torch.cuda.get_device_name(device)} is older"
    return None


def pack_quantized_weight(quantized_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight in the layout that `quantized_linear` wants on its device; the same tensor where that is the plain one.

    quantized_OI: float8_e4m3fn or int8 [O, I]; scale: float32 [O] or [ceil(O / 128), ceil(I / 128)].
    """
    if quantized_OI.device.type != "cpu":
        return quantized_OI
    reason = cpu_unsupported_reason(
        weight_dtype=quantized_OI.dtype, per_block=scale.dim() == 2, in_features=quantized_OI.shape[1]
    )
    if reason is None:
        return pack_weight_cpu(quantized_OI)
    _warn_slow(reason)
    return quantized_OI


def unpack_quantized_weight(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_quantized_weight`. → float8_e4m3fn or int8 [out_features, in_features]"""
    return packed if packed.dim() == 2 else unpack_weight_cpu(packed, out_features, in_features)


def _quantized_linear(
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
    rounded_TI: torch.Tensor | None = None,
    rounded_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    rounded = pair_of(rounded_TI, rounded_scale)
    check_arguments(packed, scale, activations, input_scale, rounded)
    weight_OI = unpack_quantized_weight(packed, out_features, x_TI.shape[1])
    dtype, math_dtype = x_TI.dtype, torch.promote_types(x_TI.dtype, torch.float32)
    if norm_weight_I is not None:
        x_TI = F.rms_norm(x_TI, (x_TI.shape[1],), norm_weight_I, eps)
    per_block = scale.dim() == 2
    x_scale = None
    if rounded is not None:
        x_TI, x_scale = rounded
    elif activations != "none":
        x_TI, x_scale = quantize_activations(x_TI, packed.dtype, per_group=per_block, input_scale=input_scale)
    # Products of two 8-bit values are exact in float32; only their sums round.
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


def exact_quantized_linear(
    x_TI: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, out_features: int, *args: Any
) -> torch.Tensor:
    """`quantized_linear` in plain torch, with all its arguments by position, but x is not rounded: what verification compares."""
    norm_weight, eps, bias, silu_mul, residual, *_ = args
    plain_OI = unpack_quantized_weight(packed, out_features, x_TI.shape[1])
    return _quantized_linear(x_TI, plain_OI, scale, out_features, norm_weight, eps, bias, silu_mul, residual)


def _quantized_linear_fake(
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
    rounded_TI: torch.Tensor | None = None,
    rounded_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape[0], out_features // 2 if silu_mul else out_features)


def _quantized_linear_slowly(x_TI: torch.Tensor, packed: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x_TI.device.type != "cpu":  # there, packing has said so
        reason = cuda_unsupported_reason(packed.device, packed.dtype) if x_TI.device.type == "cuda" else None
        _warn_slow(reason or f"there is no kernel for {_name(packed.dtype)} weights on {x_TI.device.type}")
        if not reads_rounded(x_TI.shape[0], x_TI.device, per_block=args[0].dim() == 2):  # then nobody has written it
            args, kwargs = args[:9], {n: v for n, v in kwargs.items() if not n.startswith("rounded")}
    return _quantized_linear(x_TI, packed, *args, **kwargs)


def _quantized_linear_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    # Triton is imported where it is used
    from compile_and_serve.custom_ops.quantized.cuda_linear import quantized_linear as quantized_linear_cuda

    if cuda_unsupported_reason(args[1].device, args[1].dtype) is not None:
        return _quantized_linear_slowly(*args, **kwargs)
    return quantized_linear_cuda(*args, **kwargs)


@cache
def _warn_slow(reason: str) -> None:
    log.warning("The slow torch reference of quantized linears runs: %s", reason)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ARGUMENTS = (
    "(Tensor x, Tensor packed, Tensor scale, int out_features, Tensor? norm_weight=None, float eps=1e-6, Tensor? bias=None, "
    'bool silu_mul=False, Tensor? residual=None, str activations="none", Tensor? input_scale=None, Tensor? rounded=None, '
    "Tensor? rounded_scale=None) -> Tensor"
)

# The reference under a name of its own: kernels hand to it what they do not take, and verification runs it in float64.
define(
    f"quantized_linear_reference{_ARGUMENTS}",
    kind=OpKind.CAPTURABLE,
    version=2,
    fake=_quantized_linear_fake,
    CompositeExplicitAutograd=_quantized_linear,
)
_quantized_linear_op = define(
    f"quantized_linear{_ARGUMENTS}",
    kind=OpKind.CAPTURABLE,
    version=4,
    fake=_quantized_linear_fake,
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
    rounded: Rounded | None = None,
) -> torch.Tensor:
    """out = f(q(rms_norm(x)) (scale · Q)ᵀ + bias) + residual; f is silu(first half) · second half, or nothing.

    x_TI: [T, I], rows may be strided; packed: `pack_quantized_weight(Q [O, I], scale)`; scale: float32 [O], or
    [ceil(O / 128), ceil(I / 128)]; out_features: O; norm_weight_I: [I]; bias_O: [O]; residual_TO: [T, O] (with silu_mul:
    [T, O / 2]); input_scale: float32, one value; rounded: q(rms_norm(x)) and its scales where they are known, which saves rounding to a
    kernel that does not round by itself (where `reads_rounded` says so). → [T, O], or [T, O / 2] with silu_mul, contiguous, in x's
    dtype.

    q rounds as `quantize_activations` does; the normalized x is rounded to x's dtype before. Products are summed in float32 (int8
    activations: in int32, but in float32 by the reference and for one token on CUDA), the scales multiply the sums in float32, and
    the output is rounded once to x's dtype (by a library's product on CUDA also before bias, SiLU-mul, and a residual that CUTLASS
    does not add by itself).
    """
    return _quantized_linear_op(
        x_TI, packed, scale, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, activations, input_scale,
        *(rounded or (None, None)),
    )  # fmt: skip

"""`cas::fused_linear`: a linear layer over a packed weight, with RMSNorm before it and SiLU-mul or a residual after it.

Shape legend: T tokens, I input features, O output features, B = 16 outputs per block.

There are two weight layouts, which differ in the number of dimensions:
- blocked [ceil(O / B), ceil(I / 2), 2B] (bfloat16: 16 outputs × 2 inputs, pairs of inputs adjacent, what `vdpbf16ps` reads) or
  [ceil(O / B), I, B] (float32), zero-padded: the layout of the C++ kernels;
- plain [O, I]: where there is no C++ kernel for the device and dtype, or no compiler.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cpu_kernels import cpu_kernels_status, load_cpu_kernels
from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.platform import platform_of

BLOCK_OUTPUTS = 16
# Adjacent inputs of one output: two bfloat16 values fill a 32-bit lane of the dot product.
_INPUTS_PER_LANE = {torch.bfloat16: 2, torch.float32: 1}


def packed_linear_unsupported_reason(*, device: torch.device, dtype: torch.dtype) -> str | None:
    """None when `fused_linear` has a C++ kernel for this device and dtype, else the reason in one sentence.

    The op itself runs anywhere. The first call builds the kernels.
    """
    if not platform_of(device).runs_cpp_kernels:
        return f"packed linears run on the CPU only, not on {device.type}"
    if dtype not in _INPUTS_PER_LANE:
        return f"packed linears take bfloat16 and float32, not {dtype}"
    load_cpu_kernels()
    return cpu_kernels_status()


def packed_shape(out_features: int, in_features: int, *, device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of `pack_linear_weight`'s result for a weight [out_features, in_features]."""
    if packed_linear_unsupported_reason(device=device, dtype=dtype) is not None:
        return (out_features, in_features)
    lanes = _INPUTS_PER_LANE[dtype]
    return (-(-out_features // BLOCK_OUTPUTS), -(-in_features // lanes), lanes * BLOCK_OUTPUTS)


def pack_linear_weight(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight in the layout of `fused_linear` on its device; the same tensor where that is the plain layout.

    weight_OI: [O, I] → [ceil(O / 16), ceil(I / lanes), lanes * 16] with 2 lanes (bfloat16) or 1 (float32); see `packed_shape`.
    """
    out_features, in_features = weight_OI.shape
    shape = packed_shape(out_features, in_features, device=weight_OI.device, dtype=weight_OI.dtype)
    if len(shape) == 2:
        return weight_OI
    blocks, groups, width = shape
    lanes = width // BLOCK_OUTPUTS
    padded_OI = F.pad(weight_OI, (0, groups * lanes - in_features, 0, blocks * BLOCK_OUTPUTS - out_features))
    return padded_OI.view(blocks, BLOCK_OUTPUTS, groups, lanes).transpose(1, 2).contiguous().view(shape)


def unpack_linear_weight(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_linear_weight`. → [out_features, in_features]"""
    if packed.dim() == 2:
        return packed
    blocks, groups, width = packed.shape
    padded_OI = packed.view(blocks, groups, BLOCK_OUTPUTS, width // BLOCK_OUTPUTS).transpose(1, 2).reshape(blocks * BLOCK_OUTPUTS, -1)
    return padded_OI[:out_features, :in_features]


def finish_linear(
    y_TO: torch.Tensor, silu_mul: bool, residual_TO: torch.Tensor | None, dtype: torch.dtype, gelu: bool = False
) -> torch.Tensor:
    """The epilogue of the references: SiLU-mul and residual of W x + bias in float32 or wider, with one rounding to `dtype`."""
    math_dtype = torch.promote_types(dtype, torch.float32)
    y_TO = y_TO.to(math_dtype)
    if silu_mul:
        gate, up = y_TO.chunk(2, dim=-1)
        y_TO = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    if residual_TO is not None:
        y_TO = y_TO + residual_TO.to(math_dtype)
    return y_TO.to(dtype)


def _fused_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    if norm_weight_I is not None:
        x_TI = F.rms_norm(x_TI, (x_TI.shape[1],), norm_weight_I, eps)
    y_TO = F.linear(x_TI, unpack_linear_weight(packed, out_features, x_TI.shape[1]), bias_O)
    return finish_linear(y_TO, silu_mul, residual_TO, x_TI.dtype, gelu)


def fake_linear(
    x_TI: torch.Tensor, out_features: int, norm_weight: Any = None, eps: float = 0.0, bias: Any = None, silu_mul: bool = False, *_: Any
) -> torch.Tensor:
    """The fake of linears with `silu_mul`: [T, out_features], with silu_mul half of these features."""
    return x_TI.new_empty(x_TI.shape[0], out_features // 2 if silu_mul else out_features)


def _fused_linear_cuda(*args: Any, **kwargs: Any) -> torch.Tensor:
    from compile_and_serve.custom_ops.linear.triton_linear import (
        fused_linear as triton_fused_linear,  # imported here, because Triton may be missing
    )

    return triton_fused_linear(*args, **kwargs)


FUSED_LINEAR = define(
    "fused_linear(Tensor x, Tensor packed, int out_features, Tensor? norm_weight=None, float eps=1e-6, Tensor? bias=None, "
    "bool silu_mul=False, Tensor? residual=None, bool gelu=False) -> Tensor",
    version=4,
    fake=lambda x_TI, packed, *others: fake_linear(x_TI, *others),
    reference=_fused_linear,
    flops=lambda x_TI, packed, out_features, *_: 2 * x_TI.numel() * out_features,
    CUDA=_fused_linear_cuda,
)


def fused_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """out = f(rms_norm(x) Wᵀ + bias) + residual, where f is silu(first half) · second half. All but the product is optional.

    x_TI: [T, I], rows may be strided; packed: `pack_linear_weight(W [O, I])`; out_features: O; norm_weight_I: [I];
    bias_O: [O]; residual_TO: [T, O] (with silu_mul: [T, O / 2]). → [T, O], or [T, O / 2] with silu_mul, contiguous, in x's dtype.
    gelu: f has GELU's tanh form in place of SiLU.
    Products are summed in float32. The normalized x and the output are each rounded once, to x's dtype.
    """
    return FUSED_LINEAR(x_TI, packed, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu)

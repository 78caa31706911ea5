"""Experts' weights in the layouts of the CPU's C++ kernels, each expert as a linear's weight, and the product of one expert.

Shape legend: R rows of an expert, X experts, O output features, I input features.

- unquantized: `pack_linear_weight` of each expert, in the model's dtype, without scales;
- 8-bit: `pack_quantized_weight` of each expert, with scales float32 [X, O];
- MXFP4: `pack_codes_cpu` of each expert's codes (uint8), with scales float8_e8m0fnu `pack_scales_cpu`;
- other codes with a scale per group: the same, with a `CodeFormat`, offsets and factors where the format has some.

All weights have four dimensions. Factors are [X, ceil(O / 16), S, 1 or 2, 16].
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.linear.fused_linear import fused_linear
from compile_and_serve.custom_ops.moe.code_format import CodeFormat
from compile_and_serve.custom_ops.quantization import Activations
from compile_and_serve.custom_ops.quantized.cpu_layout import pack_weight_cpu
from compile_and_serve.custom_ops.quantized.group_layout import CPU_INPUTS, pack_codes_cpu, pack_scales_cpu
from compile_and_serve.custom_ops.quantized.group_linear import group_linear, group_linear_unsupported_reason
from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK, unpack_mxfp4_codes
from compile_and_serve.custom_ops.quantized.quantized_linear import quantized_linear, quantized_linear_unsupported_reason
from compile_and_serve.custom_ops.weight_functions import weight_function

_INPUTS = 4  # adjacent inputs of the 8-bit layout: others would be padded


def packed_8bit_unsupported_reason(
    *, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, per_block: bool, in_features: int
) -> str | None:
    """None when the C++ kernels take 8-bit experts in this format, else the reason in one sentence. dtype: of the activations."""
    if in_features % _INPUTS:
        return f"the CPU kernels take experts with a multiple of {_INPUTS} inputs, not {in_features}"
    return quantized_linear_unsupported_reason(device=device, dtype=dtype, weight_dtype=weight_dtype, per_block=per_block)


def packed_mxfp4_unsupported_reason(*, device: torch.device, dtype: torch.dtype) -> str | None:
    """As `packed_8bit_unsupported_reason`."""
    return group_linear_unsupported_reason(device=device, dtype=dtype, group_size=MX_BLOCK, table="e2m1")


@weight_function("pack_8bit_experts")
def pack_8bit_experts(values_XOI: torch.Tensor) -> torch.Tensor:
    """int8 or float8_e4m3fn [X, O, I] → [X, ceil(O / 16), I / 4, 64]"""
    return torch.stack([pack_weight_cpu(values_OI) for values_OI in values_XOI])


@weight_function("pack_mxfp4_codes_cpu")
def pack_mxfp4_codes_cpu(codes_XOGH: torch.Tensor) -> torch.Tensor:
    """A checkpoint's codes, uint8 [X, O, G, 16] → uint8 [X, ceil(O / 16), G, 256]"""
    return torch.stack([pack_codes_cpu(unpack_mxfp4_codes(codes_OGH), 4) for codes_OGH in codes_XOGH])


@weight_function("pack_mxfp4_scales_cpu")
def pack_mxfp4_scales_cpu(scales_XOG: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scales, uint8 [X, O, G] → float8_e8m0fnu [X, ceil(O / 16), G, 16]"""
    packed = [pack_scales_cpu(one, one.shape[1] * MX_BLOCK, MX_BLOCK) for one in scales_XOG]
    return torch.stack(packed).view(torch.float8_e8m0fnu)


def packed_codes_unsupported_reason(*, device: torch.device, dtype: torch.dtype, form: CodeFormat, in_features: int) -> str | None:
    """As `packed_8bit_unsupported_reason`."""
    if in_features % CPU_INPUTS:
        return f"the CPU kernels take experts of codes with a multiple of {CPU_INPUTS} inputs, not {in_features}"
    return group_linear_unsupported_reason(device=device, dtype=dtype, group_size=form.group_size, table=form.table)


@weight_function("pack_expert_codes_cpu")
def pack_expert_codes_cpu(codes_XOI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [X, O, I] → uint8 [X, ceil(O / 16), I / 32, 64 · bits]"""
    return torch.stack([pack_codes_cpu(codes_OI, bits) for codes_OI in codes_XOI])


@weight_function("pack_expert_scales_cpu")
def pack_expert_scales_cpu(scale_XOG: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """Scales or offsets [X, O, G] → [X, ceil(O / 16), G, 16]"""
    is_float8 = scale_XOG.dtype == torch.float8_e4m3fn  # which torch does not pad
    values_XOG = scale_XOG.view(torch.uint8) if is_float8 else scale_XOG
    packed = torch.stack([pack_scales_cpu(scale_OG, in_features, group_size) for scale_OG in values_XOG])
    return packed.view(scale_XOG.dtype) if is_float8 else packed


@weight_function("pack_expert_factors_cpu")
def pack_expert_factors_cpu(*factors_XOS: torch.Tensor) -> torch.Tensor:
    """Factors of scales, and of minima where the format has some, [X, O, S] each → [X, ceil(O / 16), S, 1 or 2, 16]"""
    packed = [[pack_scales_cpu(one, 0, CPU_INPUTS) for one in factor_XOS] for factor_XOS in factors_XOS]
    return torch.stack([torch.stack(of_one) for of_one in packed], 3)


def is_packed(weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether a weight is in one of these layouts. A checkpoint's MXFP4 codes have four dimensions, too."""
    return weight.dim() == 4 and (weight.dtype != torch.uint8 or (scale is not None and scale.dim() == 4))


def packed_inputs(weight: torch.Tensor) -> int:
    """I of a packed weight that is not padded."""
    return weight.shape[2] * (CPU_INPUTS if weight.dtype == torch.uint8 else weight.shape[3] // 16)


def packed_linear(
    x_RI: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    out_features: int,
    bias_O: torch.Tensor | None,
    *,
    silu_mul: bool = False,
    activations: Activations = "none",
    offset: torch.Tensor | None = None,
    codes: str = "",
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """One expert's linear. weight, scale, offset, factor: its part of packed ones. activations: as in `quantized_linear`, of 8-bit weights.
    codes: the name of the format of codes.

    → [R, O] in x's dtype, with silu_mul [R, O / 2]
    """
    if scale is None:
        return fused_linear(x_RI, weight, out_features, bias_O=bias_O, silu_mul=silu_mul)
    if weight.dtype == torch.uint8:
        form = CodeFormat.of(codes)
        return group_linear(
            x_RI,
            weight,
            scale,
            offset,
            out_features,
            form.bits,
            form.group_size,
            bias_O=bias_O,
            silu_mul=silu_mul,
            table=form.table,
            factor=factor,
        )
    return quantized_linear(x_RI, weight, scale, out_features, bias_O=bias_O, silu_mul=silu_mul, activations=activations)

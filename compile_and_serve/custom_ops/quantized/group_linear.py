"""`cas::group_linear`: `cas::fused_linear` over a weight of 4-bit or 8-bit codes with a scale per output and group of inputs.

Shape legend: T tokens, I input features, O output features, G groups of inputs.

weight = (code − zero point) · scale, code · scale + minimum, or table[code] · scale. Activations stay in their dtype, except that the C++
kernels convert them to 16-bit integers with one scale for 32 inputs. `group_layout.py` describes the layouts.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cpu_kernels import quantized_cpu_kernel_library, quantized_cpu_kernels_status
from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.linear.fused_linear import fake_linear, finish_linear
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantized.group_layout import (
    CPU_INPUTS,
    CPU_OUTPUTS,
    TILE_WORDS,
    dequantize_groups,
    pack_codes_cpu,
    pack_codes_triton,
    pack_scales_cpu,
    pack_scales_triton,
    unpack_codes,
    unpack_scales,
    with_factors,
)
from compile_and_serve.custom_ops.weight_functions import weight_function

log = logging.getLogger(__name__)


def group_linear_unsupported_reason(*, device: torch.device, dtype: torch.dtype, group_size: int, table: str = "") -> str | None:
    """None when `group_linear` has a kernel for this combination, else the reason in one sentence. (The op itself runs anywhere.)

    dtype: of the activations.
    """
    if platform_of(device).runs_cpp_kernels and dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU kernel takes bfloat16 and float32, not {dtype}"
    return layout_unsupported_reason(device, group_size, table)


def group_embedding_unsupported_reason(*, device: torch.device, dtype: torch.dtype, group_size: int) -> str | None:
    """As `group_linear_unsupported_reason`, for `group_embedding`."""
    if not platform_of(device).runs_cpp_kernels:
        return "embeddings of group-quantized weights have a kernel on the CPU only"
    return group_linear_unsupported_reason(device=device, dtype=dtype, group_size=group_size)


def layout_unsupported_reason(device: torch.device, group_size: int, table: str = "") -> str | None:
    """None when the device's kernels take weights with groups of this size, else the reason in one sentence."""
    platform = platform_of(device)
    if platform.runs_cuda_kernels:
        if group_size % TILE_WORDS and not (table and group_size == TILE_WORDS // 2):
            return f"the GPU kernels take groups of a multiple of {TILE_WORDS} inputs, not of {group_size}"
        return None
    if not platform.runs_cpp_kernels:
        return f"there is no kernel for group-quantized weights on {device.type}"
    if group_size % CPU_INPUTS and group_size != CPU_INPUTS // 2:
        return f"the CPU kernel takes groups of 16 or of a multiple of {CPU_INPUTS} inputs, not of {group_size}"
    quantized_cpu_kernel_library()
    return quantized_cpu_kernels_status()


@weight_function("pack_group_codes")
def pack_group_codes(codes_OI: torch.Tensor, bits: int, group_size: int, table: str = "") -> torch.Tensor:
    """Codes in the layout of `group_linear` on their device; the same tensor where that is the plain layout. uint8 [O, I] → see there"""
    if layout_unsupported_reason(codes_OI.device, group_size, table) is not None:
        return codes_OI
    if platform_of(codes_OI.device).runs_cuda_kernels:
        return pack_codes_triton(codes_OI, bits)
    return pack_codes_cpu(codes_OI, bits)


@weight_function("pack_group_scales")
def pack_group_scales(scale_OG: torch.Tensor, in_features: int, group_size: int, table: str = "") -> torch.Tensor:
    """Scales or offsets in the layout of `group_linear` on their device. The C++ kernels take float16, float32 and uint8."""
    if layout_unsupported_reason(scale_OG.device, group_size, table) is not None:
        return scale_OG
    if platform_of(scale_OG.device).runs_cuda_kernels:
        return pack_scales_triton(scale_OG)
    if scale_OG.dtype == torch.bfloat16:
        scale_OG = scale_OG.float()
    return pack_scales_cpu(scale_OG, in_features, group_size)


def unpack_group_weight(
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    in_features: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    table: str = "",
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dequantized weight, from any layout. → `dtype` [O, I]"""
    codes_OI = unpack_codes(packed, bits, out_features, in_features)
    offset_OG = None if offset is None else unpack_scales(offset, out_features)
    scale_OG = unpack_scales(scale, out_features)
    if factor is not None:
        scale_OG, offset_OG = with_factors(scale_OG, offset_OG, tuple(unpack_scales(one, out_features) for one in factor.unbind(2)))
    return dequantize_groups(codes_OI, scale_OG, offset_OG, bits, group_size, dtype, table=table)


def _group_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    table: str = "",
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype, math_dtype = x_TI.dtype, torch.promote_types(x_TI.dtype, torch.float32)
    if norm_weight_I is not None:
        x_TI = F.rms_norm(x_TI, (x_TI.shape[1],), norm_weight_I, eps)
    weight_OI = unpack_group_weight(packed, scale, offset, out_features, x_TI.shape[1], bits, group_size, math_dtype, table, factor)
    y_TO = x_TI.to(math_dtype) @ weight_OI.T
    if bias_O is not None:
        y_TO = y_TO + bias_O
    return finish_linear(y_TO, silu_mul, residual_TO, dtype)


def _group_linear_fake(
    x_TI: Any, packed: Any, scale: Any, offset: Any, out_features: int, bits: int, group_size: int, *others: Any
) -> torch.Tensor:
    return fake_linear(x_TI, out_features, *others)


def _group_linear_slowly(x_TI: torch.Tensor, packed: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    table = args[10] if len(args) > 10 else kwargs.get("table", "")
    _warn_slow(group_linear_unsupported_reason(device=x_TI.device, dtype=x_TI.dtype, group_size=args[4], table=table))
    return _group_linear(x_TI, packed, *args, **kwargs)


def _group_linear_cuda(x_TI: torch.Tensor, packed: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if packed.dim() != 4:
        return _group_linear_slowly(x_TI, packed, *args, **kwargs)
    # imported here, because Triton may be missing
    from compile_and_serve.custom_ops.quantized.cuda_group_linear import group_linear as group_linear_cuda

    return group_linear_cuda(x_TI, packed, *args, **kwargs)


@cache
def _warn_slow(reason: str | None) -> None:
    if reason is not None:
        log.warning("The slow torch reference of group-quantized linears runs: %s", reason)


GROUP_LINEAR = define(
    "group_linear(Tensor x, Tensor packed, Tensor scale, Tensor? offset, int out_features, int bits, int group_size, "
    "Tensor? norm_weight=None, float eps=1e-6, Tensor? bias=None, bool silu_mul=False, Tensor? residual=None, "
    'str table="", Tensor? factor=None) -> Tensor',
    version=3,
    fake=_group_linear_fake,
    reference=_group_linear,
    CompositeExplicitAutograd=_group_linear_slowly,
    CUDA=_group_linear_cuda,
)


def _group_embedding(
    ids_T: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    num_rows: int,
    in_features: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    if packed.dim() == 2:
        parts = [values if values is None else values[ids_T] for values in (packed, scale, offset)]
    else:  # rows lie in blocks; only the CPU packs embeddings
        blocks, lanes = ids_T // CPU_OUTPUTS, ids_T % CPU_OUTPUTS
        own = torch.arange(ids_T.shape[0], device=ids_T.device)
        codes = unpack_codes(packed[blocks], bits, ids_T.shape[0] * CPU_OUTPUTS, in_features)[own * CPU_OUTPUTS + lanes]
        others = [None if values is None else values[blocks, :, lanes] for values in (scale, offset)]
        parts = [codes, *others]
    codes_TI, scale_TG, offset_TG = parts
    assert codes_TI is not None
    assert scale_TG is not None
    return dequantize_groups(codes_TI, scale_TG, offset_TG, bits, group_size, dtype)


def _group_embedding_fake(ids_T: Any, packed: Any, scale: torch.Tensor, *others: Any) -> torch.Tensor:
    _, _, in_features, *_, dtype = others
    return scale.new_empty(ids_T.shape[0], in_features, dtype=dtype)


# `group_embedding(ids [T], weight …)` → rows of the dequantized weight [T, I] in `dtype`, as `group_linear` stores it.
GROUP_EMBEDDING = define(
    "group_embedding(Tensor ids, Tensor packed, Tensor scale, Tensor? offset, int num_rows, int in_features, int bits, int group_size, "
    "ScalarType dtype) -> Tensor",
    version=2,
    fake=_group_embedding_fake,
    reference=_group_embedding,
)


def group_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    table: str = "",
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = f(rms_norm(x) Wᵀ + bias) + residual, where f is silu(first half) · second half with silu_mul.

    x_TI: [T, I], rows may be strided; packed: `pack_group_codes(codes uint8 [O, I])`; scale, offset: `pack_group_scales([O, G])`, offset as
    in `dequantize_groups`; out_features: O; bits: 4 or 8; group_size: inputs per group; norm_weight_I: [I]; bias_O: [O];
    residual_TO: [T, O] (with silu_mul: [T, O / 2]); table: as in `dequantize_groups`. factor: of packed
    scales and minima on the CPU, [ceil(O / 16), S, 1 or 2, 16] (`moe/code_format.py`).
    → [T, O], or [T, O / 2] with silu_mul, contiguous, in x's dtype.

    Products are summed in float32, scaled in float32, and rounded once to x's dtype. The normalized x is rounded to x's dtype. For many
    tokens on CUDA, the weight is rounded to x's dtype, and products round before bias, SiLU-mul and residual. C++: see above.
    """
    return GROUP_LINEAR(
        x_TI, packed, scale, offset, out_features, bits, group_size, norm_weight_I, eps, bias_O, silu_mul, residual_TO, table, factor
    )

"""Matrix products of 8-bit weights by libraries: torch's, and CUTLASS' and DeepGEMM's where they are built.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.compat import int8_matmul, scaled_matmul
from compile_and_serve.custom_ops.quantization import dequantize_weight
from compile_and_serve.custom_ops.quantized.cutlass_gemm import BLOCKS, ROWS, load_gemms, run_gemm, takes_residual, unsupported_reason
from compile_and_serve.custom_ops.quantized.deep_gemm import DEEP, load_deep_gemms, run_deep_gemm
from compile_and_serve.custom_ops.triton_quantize import scale_sums

TORCH = "torch"  # `scaled_matmul` or `int8_matmul`
EXPANDED = "expanded"  # a product with the weight converted to the activations' dtype
_MIN_EXPANDED_TOKENS = 65  # with fewer, converting the weight costs more than any other kernel
_MIN_INT8_TOKENS = 17  # of `int8_matmul`
_MIN_DEEP_TOKENS = 65  # with fewer, most rows of a tile are empty


def gemm_names(num_tokens: int, weight_OI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, is_quantized: bool) -> tuple[str, ...]:
    """Names of the products for these operands. The first is the default without a measurement.

    dtype: of the result. is_quantized: whether the activations are quantized to the weight's dtype.
    """
    if not is_quantized:
        return (EXPANDED,) if num_tokens >= _MIN_EXPANDED_TOKENS else ()
    names: tuple[str, ...] = ()
    fits_torch = scale.dim() == 1 and not (weight_OI.shape[0] % 16 or weight_OI.shape[1] % 16)
    if fits_torch and (weight_OI.dtype != torch.int8 or num_tokens >= _MIN_INT8_TOKENS):
        names = (TORCH,)
    # Quantized activations have the weight's layout, contiguous rows of I.
    if dtype == torch.bfloat16 and unsupported_reason(weight_OI, weight_OI) is None:
        if load_gemms(weight_OI.device):
            names += ROWS if scale.dim() == 1 else BLOCKS[::-1]
        if scale.dim() == 2 and num_tokens >= _MIN_DEEP_TOKENS and load_deep_gemms(weight_OI.device):
            names += DEEP
    return names


def scaled_gemm(
    name: str,
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = (x · x_scale) (scale · W)ᵀ + residual, by one of `gemm_names`. → `dtype` [T, O]

    x_TI: quantized to the weight's dtype, with scales [T, 1] or [T, G]; or not quantized, without scales. CUTLASS' products add the
    residual before their rounding; the others also round before they add it.
    """
    if name in ROWS + BLOCKS and (residual_TO is None or takes_residual(residual_TO)):
        library = load_gemms(x_TI.device)
        assert library is not None, "gemm_names named a product that is not built"
        assert x_scale is not None
        return run_gemm(library, name, x_TI, weight_OI, x_scale, scale, residual_TO)
    if residual_TO is not None:
        return scaled_gemm(name, x_TI, x_scale, weight_OI, scale, dtype) + residual_TO
    if name in DEEP:
        library = load_deep_gemms(x_TI.device)
        assert library is not None, "gemm_names named a product that is not built"
        assert x_scale is not None
        return run_deep_gemm(library, name, x_TI, weight_OI, x_scale, scale)
    if x_scale is None:
        return F.linear(x_TI, dequantize_weight(weight_OI, scale, dtype))
    if weight_OI.dtype == torch.int8:
        return scale_sums(int8_matmul(x_TI, weight_OI.t()), x_scale, scale, dtype)
    if dtype == torch.bfloat16:
        return scaled_matmul(x_TI, weight_OI.t(), x_scale, scale[None, :], dtype=dtype)
    one = torch.ones((), dtype=torch.float32, device=x_TI.device)  # torch takes scales per row with bfloat16 results only
    sums_TO = scaled_matmul(x_TI, weight_OI.t(), one, one, dtype=torch.float32)
    return scale_sums(sums_TO, x_scale, scale, dtype)

"""The libraries' matrix products for weights of 8 bits: torch's, and CUTLASS' where they are built.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.compat import int8_matmul, scaled_matmul
from compile_and_serve.custom_ops.quantization import dequantize_weight
from compile_and_serve.custom_ops.quantized.cutlass_gemm import (
    BLOCKS,
    ROWS,
    load_gemms,
    run_gemm,
    takes_residual,
    unsupported_reason,
)
from compile_and_serve.custom_ops.triton_quantize import scale_sums

TORCH = "torch"  # torch's own: `scaled_matmul`, `int8_matmul`
EXPANDED = "expanded"  # a product with the weight in the activations' dtype, made for the call
_MIN_EXPANDED_TOKENS = 65  # below, expanding the weight costs more than any way to read it as it is
_MIN_INT8_TOKENS = 17  # what `int8_matmul` takes


def gemm_names(
    num_tokens: int, weight_OI: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, is_rounded: bool
) -> tuple[str, ...]:
    """What `scaled_gemm` has for these operands, the one to take without measuring first.

    dtype: of the result. is_rounded: whether the activations are rounded to the weight's dtype.
    """
    if not is_rounded:
        return (EXPANDED,) if num_tokens >= _MIN_EXPANDED_TOKENS else ()
    names: tuple[str, ...] = ()
    fits_torch = scale.dim() == 1 and not (weight_OI.shape[0] % 16 or weight_OI.shape[1] % 16)
    if fits_torch and (weight_OI.dtype != torch.int8 or num_tokens >= _MIN_INT8_TOKENS):
        names = (TORCH,)
    # Rounded activations lie as the weight does, in rows of I.
    if dtype == torch.bfloat16 and unsupported_reason(weight_OI, weight_OI) is None and load_gemms(weight_OI.device):
        names += ROWS if scale.dim() == 1 else BLOCKS[::-1]
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

    x_TI: rounded to the weight's dtype, with its scales [T, 1] or [T, G]; or, without them, as it is. CUTLASS' products take the
    residual in, before the one rounding; others round before it is added, too.
    """
    if name in ROWS + BLOCKS and (residual_TO is None or takes_residual(residual_TO)):
        library = load_gemms(x_TI.device)
        assert library is not None, "gemm_names named what is not built"
        assert x_scale is not None
        return run_gemm(library, name, x_TI, weight_OI, x_scale, scale, residual_TO)
    if residual_TO is not None:
        return scaled_gemm(name, x_TI, x_scale, weight_OI, scale, dtype) + residual_TO
    if x_scale is None:
        return F.linear(x_TI, dequantize_weight(weight_OI, scale, dtype))
    if weight_OI.dtype == torch.int8:
        return scale_sums(int8_matmul(x_TI, weight_OI.t()), x_scale, scale, dtype)
    if dtype == torch.bfloat16:
        return scaled_matmul(x_TI, weight_OI.t(), x_scale, scale[None, :], dtype=dtype)
    one = torch.ones((), dtype=torch.float32, device=x_TI.device)  # scales per row come with bfloat16 results only
    sums_TO = scaled_matmul(x_TI, weight_OI.t(), one, one, dtype=torch.float32)
    return scale_sums(sums_TO, x_scale, scale, dtype)

"""Checks of `cas::quantized_linear`'s arguments, which the op and its CUDA kernels share."""

from __future__ import annotations

from typing import get_args

import torch

from compile_and_serve.custom_ops.quantization import LARGEST, Activations, Quantized

KINDS = get_args(Activations)


def pair_of(quantized_TI: torch.Tensor | None, quantized_scale: torch.Tensor | None) -> Quantized | None:
    """Quantized activations and their scales, from two arguments of the op."""
    if (quantized_TI is None) != (quantized_scale is None):
        raise ValueError("quantized_linear takes quantized activations and their scales together.")
    return None if quantized_TI is None or quantized_scale is None else (quantized_TI, quantized_scale)


def check_arguments(
    packed: torch.Tensor, scale: torch.Tensor, activations: str, input_scale: torch.Tensor | None, quantized: Quantized | None = None
) -> None:
    """Raise `ValueError` for arguments that do not go together."""
    if packed.dtype not in LARGEST:
        raise ValueError(f"quantized_linear takes float8_e4m3fn and int8 weights, not {packed.dtype}.")
    if activations not in KINDS:
        raise ValueError(f"quantized_linear's activations must be one of {', '.join(KINDS)}, not {activations!r}.")
    if (activations == "static") != (input_scale is not None):
        raise ValueError("quantized_linear needs an input_scale with static activations, and only then.")
    if activations == "static" and scale.dim() == 2:
        raise ValueError("quantized_linear has no static activations where the weight's scales are per block.")
    if quantized is not None and (activations == "none" or quantized[0].dtype != packed.dtype):
        raise ValueError("quantized_linear takes quantized activations in the weight's dtype, and only where it would quantize them.")

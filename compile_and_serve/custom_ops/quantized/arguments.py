"""Checks of `cas::quantized_linear`'s arguments, which the op and its CUDA kernels share.

Shape legend: T tokens, I input features, G = ceil(I / 128) groups of inputs.
"""

from __future__ import annotations

from typing import get_args

import torch

from compile_and_serve.custom_ops.quantization import LARGEST, Activations, Rounded

KINDS = get_args(Activations)


def reads_rounded(num_tokens: int, device: torch.device, *, per_block: bool) -> bool:
    """Whether `quantized_linear` reads activations that come rounded to it: on CUDA the kernels of one token round by themselves.

    per_block: whether the weight's scale is per block, for which they have no kernel.
    """
    return device.type != "cuda" or num_tokens > 1 or per_block


def pair_of(rounded_TI: torch.Tensor | None, rounded_scale: torch.Tensor | None) -> Rounded | None:
    """Activations that come rounded, with their scales, of an op's two arguments."""
    if (rounded_TI is None) != (rounded_scale is None):
        raise ValueError("Activations that come rounded need their scales, and scales those activations.")
    return None if rounded_TI is None or rounded_scale is None else (rounded_TI, rounded_scale)


def check_arguments(
    packed: torch.Tensor, scale: torch.Tensor, activations: str, input_scale: torch.Tensor | None,
    rounded: Rounded | None = None,
) -> None:  # fmt: skip
    if packed.dtype not in LARGEST:
        raise ValueError(f"quantized_linear takes float8_e4m3fn and int8 weights, not {packed.dtype}.")
    if activations not in KINDS:
        raise ValueError(f"quantized_linear's activations must be one of {', '.join(KINDS)}, not {activations!r}.")
    if (activations == "static") != (input_scale is not None):
        raise ValueError("quantized_linear needs an input_scale with static activations, and only then.")
    if activations == "static" and scale.dim() == 2:
        raise ValueError("quantized_linear has no static activations where the weight's scales are per block.")
    if rounded is not None and (activations == "none" or rounded[0].dtype != packed.dtype):
        raise ValueError("quantized_linear takes rounded activations in the weight's dtype, where it would round them.")

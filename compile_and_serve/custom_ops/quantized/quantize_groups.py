"""Quantizing weights to unsigned codes with a scale and a zero point for each group of adjacent inputs, in plain torch.

Shape legend: O output features, I input features, G = ceil(I / group size). Stacked weights of experts have X in front.

    weight ≈ (code − zero point) · scale        0 ≤ code, zero point < 2^bits

A group's codes span its smallest to its largest weight, and zero. `dequantize_groups` is the inverse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.weight_functions import weight_function

_SMALLEST_SCALE = 2.0**-24  # of float16; the scale of zeros


def _groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """[…, I] → float32 or float64 […, G, group size]; zeros fill up the last group."""
    in_features = weight.shape[-1]
    groups = -(-in_features // group_size)
    padded = F.pad(weight.to(torch.promote_types(weight.dtype, torch.float32)), (0, groups * group_size - in_features))
    return padded.view(*weight.shape[:-1], groups, group_size)


@weight_function("group_scales")
def group_scales(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """(largest − smallest weight of the group, zero included) / (2^bits − 1). […, O, I] → […, O, G]: of 4 bits float16, else
    float32 (of float64 weights float64).

    float16 is rounded down, so that the codes of a quantized weight span all values again: quantizing it once more changes nothing.
    """
    groups = _groups(weight, group_size)
    span = groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)
    scale = (span / ((1 << bits) - 1)).clamp(_SMALLEST_SCALE, torch.finfo(torch.float16).max)
    if bits > 4:
        return scale
    rounded = scale.to(torch.float16)
    below = (rounded.view(torch.int16) - 1).view(torch.float16)  # the next smaller number, of positive ones
    return torch.where(rounded.to(scale.dtype) > scale, below, rounded)


@weight_function("group_zero_points")
def group_zero_points(weight: torch.Tensor, scale: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The code of zero: round(−smallest weight of the group / scale), ties to even. scale: of `group_scales`. → uint8 […, O, G]"""
    smallest = _groups(weight, group_size).amin(-1).clamp_max(0)
    return (-smallest / scale.to(smallest.dtype)).round().clamp(0, (1 << bits) - 1).to(torch.uint8)


@weight_function("quantize_groups")
def quantize_groups(weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """round(w / scale) + zero point, ties to even. scale, zero_point: of the functions above. → uint8 […, O, I]"""
    groups = _groups(weight, group_size)
    codes = (groups / scale.to(groups.dtype)[..., None]).round() + zero_point[..., None]
    return codes.clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(-2)[..., : weight.shape[-1]].contiguous()

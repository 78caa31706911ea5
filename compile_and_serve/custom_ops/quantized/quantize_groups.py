"""Quantizing weights to unsigned codes with a scale and a minimum for each group of adjacent inputs, in plain torch.

Shape legend: O output features, I input features, G = ceil(I / group size). Stacked weights of experts have X in front.

    weight ≈ code · scale + minimum        0 ≤ code < 2^bits

A group's codes span its smallest to its largest weight. `dequantize_groups` is the inverse.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.weight_functions import weight_function

_SMALLEST_SCALE = 2.0**-24  # of float16; the scale of equal weights


def _groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """[…, I] → float32 or float64 […, G, group size]; copies of the last column fill up the last group."""
    in_features = weight.shape[-1]
    groups = -(-in_features // group_size)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if missing := groups * group_size - in_features:
        wide = torch.cat((wide, wide[..., -1:].expand(*wide.shape[:-1], missing)), -1)
    return wide.view(*weight.shape[:-1], groups, group_size)


@weight_function("group_minima")
def group_minima(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The smallest weight of each group. […, O, I] → […, O, G]: of 4 bits float16, else float32 (of float64 weights float64)."""
    smallest = _groups(weight, group_size).amin(-1)
    largest = torch.finfo(torch.float16).max
    return smallest if bits > 4 else smallest.clamp(-largest, largest).to(torch.float16)


@weight_function("group_scales")
def group_scales(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """(largest − smallest weight of the group) / (2^bits − 1). Shape and dtype: as of `group_minima`.

    float16 is rounded down, so that the codes of a quantized weight span all values again: quantizing it once more changes nothing.
    """
    groups = _groups(weight, group_size)
    scale = (groups.amax(-1) - groups.amin(-1)) / ((1 << bits) - 1)
    scale = scale.clamp(_SMALLEST_SCALE, torch.finfo(torch.float16).max)
    if bits > 4:
        return scale
    rounded = scale.to(torch.float16)
    below = (rounded.view(torch.int16) - 1).view(torch.float16)  # the next smaller number, of positive ones
    return torch.where(rounded.to(scale.dtype) > scale, below, rounded)


@weight_function("quantize_groups")
def quantize_groups(weight: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """round((w − minimum) / scale), ties to even. scale, minimum: of the functions above. → uint8 […, O, I]"""
    groups = _groups(weight, group_size)
    codes = ((groups - minimum.to(groups.dtype)[..., None]) / scale.to(groups.dtype)[..., None]).round()
    return codes.clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(-2)[..., : weight.shape[-1]].contiguous()

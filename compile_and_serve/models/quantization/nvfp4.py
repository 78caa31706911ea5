"""NVFP4: e2m1 codes, a float8_e4m3fn scale for 16 inputs and a float32 scale for the tensor. compressed-tensors and ModelOpt store it."""

from __future__ import annotations

import torch
from torch import nn

from compile_and_serve.custom_ops.stored_weight import GroupedParts, QuantizedWeight, StoredTensor, around, codes_std
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.quantization.groups import require_whole_groups

NVFP4_GROUP = 16
_SCALE = 64.0  # of a group, in examples
_STD = codes_std(4, "e2m1") * _SCALE


def nvfp4_weight(name: str, linear: nn.Linear, *, codes: str, factor: str, divides: bool) -> QuantizedWeight:
    """A linear in NVFP4. codes, factor: names of the codes and of the tensor's scale. divides: the scale divides."""
    out_features, in_features = linear.weight.shape
    require_whole_groups(name, in_features, NVFP4_GROUP, "NVFP4")
    codes, factor, scale, power = f"{name}.{codes}", f"{name}.{factor}", f"{name}.weight_scale", -1 if divides else 1
    return QuantizedWeight(
        parts=GroupedParts(
            bits=4,
            group_size=NVFP4_GROUP,
            codes=("low_nibble_first", codes),
            scale=scale,
            scale_factor=("divisor_of_rows" if divides else "factor_of_rows", factor, scale),
            plain_scale=("divided_scales" if divides else "scaled_scales", scale, factor),
            table="e2m1",
        ),
        tensors=(
            StoredTensor(name=codes, shape=(out_features, in_features // 2), dtype=torch.uint8),
            StoredTensor(
                name=scale, shape=(out_features, in_features // NVFP4_GROUP), dtype=torch.float8_e4m3fn, fill=around(lambda std: _SCALE)
            ),
            StoredTensor(name=factor, shape=(1,), dtype=torch.float32, fill=around(lambda std: (std / _STD) ** power), weight_power=power),
        ),
        unused=(f"{name}.input_global_scale", f"{name}.input_scale"),
    )


@weight_function("scaled_scales")
def scaled_scales(scale_OG: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """ModelOpt's NVFP4: float8 scales and `weight_scale_2`, one value. → float32 [O, G] (float64 of float64)"""
    return _wide(scale_OG) * _wide(factor).reshape(1, 1)


@weight_function("divided_scales")
def divided_scales(scale_OG: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """compressed-tensors' NVFP4: float8 scales and `weight_global_scale`, one value. → float32 [O, G] (float64 of float64)"""
    return _wide(scale_OG) / _wide(divisor).reshape(1, 1)


@weight_function("factor_of_rows")
def factor_of_rows(factor: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """`weight_scale_2` for each row. → float32 [O, 1] (float64 of float64)"""
    return _wide(factor).reshape(1, 1).expand(scale_OG.shape[0], 1).contiguous()


@weight_function("divisor_of_rows")
def divisor_of_rows(divisor: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """1 / `weight_global_scale` for each row. → float32 [O, 1] (float64 of float64)"""
    return factor_of_rows(_wide(divisor).reciprocal(), scale_OG)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype == torch.float8_e4m3fn else values.to(torch.promote_types(values.dtype, torch.float32))

"""MXFP4: e2m1 codes and a power of two for 32 inputs. compressed-tensors and Quark store it for linears, gpt-oss for experts.

Shape legend: X experts, O output features, I input features, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import nn

from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK
from compile_and_serve.custom_ops.stored_weight import GroupedParts, Mxfp4Parts, QuantizedWeight, StoredTensor, exponents
from compile_and_serve.custom_ops.weight_functions import Expression, weight_function
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization.groups import require_whole_groups


def mxfp4_weight(name: str, linear: nn.Linear, *, codes: str) -> QuantizedWeight:
    """A linear in MXFP4. codes: name of the codes."""
    out_features, in_features = linear.weight.shape
    require_whole_groups(name, in_features, MX_BLOCK, "MXFP4")
    codes, scale = f"{name}.{codes}", f"{name}.weight_scale"
    parts = GroupedParts(bits=4, group_size=MX_BLOCK, codes=("low_nibble_first", codes), scale=("powers_of_two", scale), table="e2m1")
    tensors = (
        StoredTensor(name=codes, shape=(out_features, in_features // 2), dtype=torch.uint8),
        StoredTensor(name=scale, shape=(out_features, in_features // MX_BLOCK), dtype=torch.uint8, fill=exponents),
    )
    return QuantizedWeight(parts=parts, tensors=tensors)


def mxfp4_experts(name: str, shape: tuple[int, ...], *, rows_alternate: bool) -> QuantizedWeight:
    """Stacked weights of experts in `{name}_blocks` and `{name}_scales`. rows_alternate: gate and up rows do.

    Raises `ModelConfigError` for a size that is not whole blocks.
    """
    num_experts, outputs, inputs = shape
    if inputs % MX_BLOCK:
        raise ModelConfigError(
            f"{name} has {inputs} inputs, but MXFP4 needs a multiple of {MX_BLOCK}: check the sizes in the model's config."
        )
    codes, scales, groups = f"{name}_blocks", f"{name}_scales", inputs // MX_BLOCK

    def in_order(tensor: str) -> Expression:
        return ("deinterleave_rows", tensor) if rows_alternate else tensor

    return QuantizedWeight(
        parts=Mxfp4Parts(codes=in_order(codes), scale=in_order(scales)),
        tensors=(
            StoredTensor(name=codes, shape=(num_experts, outputs, groups, MX_BLOCK // 2), dtype=torch.uint8),
            StoredTensor(name=scales, shape=(num_experts, outputs, groups), dtype=torch.uint8, fill=exponents),
        ),
    )


@weight_function("low_nibble_first")
def low_nibble_first(packed_OH: torch.Tensor) -> torch.Tensor:
    """NVFP4 and MXFP4: two codes in a byte, the lower input in the lower bits. uint8 [O, I / 2] → [O, I]"""
    return torch.stack((packed_OH & 15, packed_OH >> 4), 2).flatten(1)


@weight_function("powers_of_two")
def powers_of_two(exponent_OG: torch.Tensor) -> torch.Tensor:
    """MXFP4's e8m0: 2^(exponent − 127). uint8 [O, G] → float32 [O, G]"""
    return torch.ldexp(torch.ones_like(exponent_OG, dtype=torch.float32), exponent_OG.to(torch.int32) - 127)

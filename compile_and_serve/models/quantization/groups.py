"""What formats with a scale per group of inputs share.

Shape legend: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compile_and_serve.custom_ops.stored_weight import StoredTensor, around, codes_std
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization.config_fields import require

_WHOLE = 128  # one group per output is a group of the inputs, rounded up to this multiple
_KERNEL_GROUP = 16  # groups are multiples of this


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` values of `bits` bits along dimension 1, a little-endian stream over int32 words.

    words: int32 [R, W] → uint8 [R, count]
    """
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
        return values.flatten(1)[:, :count].to(torch.uint8)
    positions = torch.arange(count, device=words.device) * bits
    at, shift = positions // 32, (positions % 32).to(torch.int64)
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    following = torch.nn.functional.pad(unsigned, (0, 1))[:, at + 1]
    return (((unsigned[:, at] >> shift) | (following << (32 - shift))) & ((1 << bits) - 1)).to(torch.uint8)


@weight_function("transposed")
def transposed(scale: torch.Tensor) -> torch.Tensor:
    """[G, O] → [O, G]"""
    return scale.t().contiguous()


def scales_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, bits: int, table: str = "") -> StoredTensor:
    """Scales of codes. Those with the exponents of float32 take any factor."""
    spread = codes_std(bits, table)
    power = int(dtype in (torch.float32, torch.bfloat16))
    return StoredTensor(name=name, shape=shape, dtype=dtype, fill=around(lambda std: std / spread), weight_power=power)


def groups_of(name: str, in_features: int, group_size: int) -> tuple[int, int]:
    """(inputs per group, groups); a group_size of −1 is one group per output."""
    if group_size == -1 or group_size >= in_features:
        return -(-in_features // _WHOLE) * _WHOLE, 1
    if group_size <= 0 or group_size % _KERNEL_GROUP:
        raise ModelConfigError(f"quantization_config's group_size is {group_size}: expected -1 or a multiple of {_KERNEL_GROUP}.")
    if in_features % group_size:
        raise ModelConfigError(
            f"quantization_config's group_size is {group_size}, which does not divide the {in_features} inputs of {name}."
        )
    return group_size, in_features // group_size


def bits_of(settings: Mapping[str, Any]) -> int:
    """Bits of a code. Raises `ModelConfigError`."""
    require("bits", settings.get("bits"), (2, 3, 4, 8))
    return int(settings["bits"])


def require_multiple(name: str, what: str, size: int, multiple: int) -> None:
    """Raise `ModelConfigError` if a packed format does not hold `size` inputs or outputs."""
    if size % multiple:
        raise ModelConfigError(f"{name} has {size} {what}, but its packed format needs a multiple of {multiple}.")


def require_whole_groups(name: str, in_features: int, size: int, what: str) -> None:
    """Raise `ModelConfigError` if groups of a fixed size do not divide the inputs."""
    if in_features % size:
        raise ModelConfigError(
            f"{name} has {in_features} inputs, which the {size} values of a scale in {what} do not divide: this is not supported."
        )

"""A checkpoint format from outside of the package: weights of −1, 0 and 1 times a step for 32 inputs, four in a byte.

A linear is `weight_trits` uint8 [O, I / 4], the first input in the lowest bits, as 1, 2 and 3, and `weight_step` float32 [O, I / 32].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compile_and_serve.custom_ops.stored_weight import GroupedParts, QuantizedWeight, StoredTensor, around, codes_std
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization.checkpoint_format import linears_of, register_checkpoint_format
from compile_and_serve.models.spec import ModelSpec

GROUP = 32


@register_checkpoint_format("ternary")
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    if config.get("group_size") != GROUP:
        raise ModelConfigError(f"Ternary weights have groups of {GROUP}, not of {config.get('group_size')}.")
    return {f"{name}.weight": _weight(f"{name}.weight", *one.weight.shape) for name, one in linears_of(spec).items() if name != "lm_head"}


def _weight(name: str, out_features: int, in_features: int) -> QuantizedWeight:
    trits, step = f"{name}_trits", f"{name}_step"
    return QuantizedWeight(
        parts=GroupedParts(bits=2, group_size=GROUP, codes=("trit_codes", trits), scale=step),
        tensors=(
            StoredTensor(name=trits, shape=(out_features, in_features // 4), dtype=torch.uint8),
            StoredTensor(
                name=step,
                shape=(out_features, in_features // GROUP),
                dtype=torch.float32,
                fill=around(lambda std: std / codes_std(2)),
                weight_power=1,
            ),
        ),
    )


@weight_function("trit_codes")
def trit_codes(packed: torch.Tensor) -> torch.Tensor:
    """→ uint8 [O, I]"""
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)

"""`awq` (AutoAWQ, version "gemm"): 4 bits with zero points, `qweight`, `qzeros`, `scales`.

Shape legend: I input features, O output features, G groups of inputs. Source: AutoAWQ's `awq/utils/packing_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.stored_weight import GroupedParts, QuantizedWeight, StoredTensor, near_middle
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import integer, is_ignored, require
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.quantization.groups import groups_of, require_multiple, scales_tensor
from compile_and_serve.models.spec import ModelSpec

# Of outputs 8 · word … 8 · word + 7. Nibbles are in the order 0, 2, 4, 6, 1, 3, 5, 7.
_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


@register_checkpoint_format(
    "awq", fields=FormatFields(read="bits w_bit group_size q_group_size zero_point version modules_to_not_convert", no_effect="backend")
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    bits = config.get("bits", config.get("w_bit", 4))
    require("bits", bits, (4,))
    require("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    require("zero_point", config.get("zero_point", True), (True,))
    group_size = integer(config, "group_size", config.get("q_group_size", 128))
    ignored = ["lm_head", *(config.get("modules_to_not_convert") or [])]
    kept = {name: linear for name, linear in matrices_of(spec).items() if not is_ignored(name, ignored)}
    return {f"{name}.weight": awq_weight(name, linear, group_size) for name, linear in kept.items()}


def awq_weight(name: str, linear: nn.Linear, group_size: int) -> QuantizedWeight:
    """A linear in AWQ's format: qweight int32 [I, O / 8], qzeros int32 [G, O / 8], scales float16 [G, O]."""
    out_features, in_features = linear.weight.shape
    group_size, groups = groups_of(name, in_features, group_size)
    require_multiple(name, "outputs", out_features, 8)
    return QuantizedWeight(
        parts=GroupedParts(
            bits=4,
            group_size=group_size,
            codes=("awq_codes", f"{name}.qweight"),
            scale=("transposed", f"{name}.scales"),
            offset=("awq_codes", f"{name}.qzeros"),
        ),
        tensors=(
            StoredTensor(name=f"{name}.qweight", shape=(in_features, out_features // 8), dtype=torch.int32),
            StoredTensor(name=f"{name}.qzeros", shape=(groups, out_features // 8), dtype=torch.int32, fill=near_middle(4)),
            scales_tensor(f"{name}.scales", (groups, out_features), torch.float16, 4),
        ),
    )


@weight_function("awq_codes")
def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """AWQ's qweight [I, O / 8] or qzeros [G, O / 8], int32 → uint8 [O, I] or [O, G]"""
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    nibbles = (words[:, :, None] >> shifts) & 15
    return nibbles.flatten(1).to(torch.uint8).t().contiguous()

"""`auto-round`: AWQ's or GPTQ's tensors, as `packing_format` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compile_and_serve.custom_ops.stored_weight import QuantizedWeight
from compile_and_serve.models.quantization.awq import awq_weight
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import as_list, integer, require
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.quantization.gptq import gptq_weight
from compile_and_serve.models.quantization.groups import bits_of
from compile_and_serve.models.spec import ModelSpec


@register_checkpoint_format(
    "auto-round",
    "intel/auto-round",
    fields=FormatFields(
        read="bits group_size packing_format backend block_name_to_quantize to_quant_block_names extra_config",
        no_effect="sym",  # the zero points are stored, also of symmetric weights
        expected={"data_type": ("int",), "act_bits": (16, 32), "super_bits": (), "super_group_size": (), "rotation_config": ()},
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    known = ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_gptq", "auto_awq")
    require("packing_format", packing, known)
    blocks = as_list(config.get("block_name_to_quantize") or config.get("to_quant_block_names") or [])
    found: dict[str, QuantizedWeight] = {}
    extra = config.get("extra_config") or {}
    for name, linear in matrices_of(spec).items():
        own = next((extra[key] for key in extra if key == name or _matches(key, name)), None)
        if own is None and (name == "lm_head" or (blocks and not any(name.startswith(f"{block}.") for block in blocks))):
            continue
        settings = {**config, **(own or {})}
        if settings.get("bits", 4) >= 16:
            continue
        group_size = integer(settings, "group_size", 128)
        if packing.endswith("auto_awq"):
            require("bits", settings.get("bits"), (4,))
            found[f"{name}.weight"] = awq_weight(name, linear, group_size)
        else:
            found[f"{name}.weight"] = gptq_weight(name, linear, bits_of(settings), group_size, stores_less=True, act_order=False)
    return found


def _matches(pattern: str, name: str) -> bool:
    """Whether a key of extra_config is a regular expression for the module."""
    return any(character in pattern for character in "*+[(\\") and re.fullmatch(pattern, name) is not None

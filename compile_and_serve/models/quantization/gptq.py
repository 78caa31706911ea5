"""`gptq` (AutoGPTQ, GPTQModel): 2, 3, 4 and 8 bits, with or without act-order (`desc_act`), in `qweight`, `qzeros`, `scales` and `g_idx`.

The format "gptq" stores zero points minus 1, "gptq_v2" as they are. Shape legend: I input features, O output features, G groups of inputs.
Source: AutoGPTQ's `qlinear_cuda_old.py` (bit stream, zero points minus 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.stored_weight import GroupedParts, QuantizedWeight, StoredTensor, near_middle, shuffled_groups
from compile_and_serve.custom_ops.weight_functions import weight_function
from compile_and_serve.models.quantization.checkpoint_format import FormatFields, register_checkpoint_format
from compile_and_serve.models.quantization.config_fields import as_list, integer, is_ignored, require
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.quantization.groups import bits_of, groups_of, require_multiple, scales_tensor, unpack_bits
from compile_and_serve.models.spec import ModelSpec


@register_checkpoint_format(
    "gptq",
    fields=FormatFields(
        read="bits group_size desc_act static_groups checkpoint_format format lm_head modules_to_not_convert dynamic "
        "modules_in_block_to_quantize",
        # The zero points are stored, also of symmetric weights.
        no_effect="sym tokenizer dataset damp_percent act_group_aware true_sequential meta backend model_seqlen block_name_to_quantize "
        "module_name_preceding_first_block batch_size pad_token_id max_input_length cache_block_outputs",
        expected={"pack_dtype": ("int32",), "adapter": (), "rotation": ()},
    ),
)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → how the checkpoint stores it. Raises `ModelConfigError`."""
    file_format = config.get("checkpoint_format") or config.get("format") or "gptq"
    require("checkpoint_format", file_format, ("gptq", "gptq_v2"))
    only = [name for names in config.get("modules_in_block_to_quantize") or [] for name in as_list(names)]
    ignored = [*([] if config.get("lm_head") else ["lm_head"]), *(config.get("modules_to_not_convert") or [])]
    found: dict[str, QuantizedWeight] = {}
    for name, linear in matrices_of(spec).items():
        if is_ignored(name, ignored) or (only and not any(name.endswith(f".{one}") for one in only)):
            continue
        settings = _overridden(config, name)
        if settings is None:
            continue
        found[f"{name}.weight"] = gptq_weight(
            name,
            linear,
            bits_of(settings),
            integer(settings, "group_size", 128),
            stores_less=file_format == "gptq",
            act_order=bool(settings.get("desc_act", False)) and not settings.get("static_groups", False),
        )
    return found


def _overridden(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The settings of a module with GPTQModel's `dynamic` rules (regular expression → settings); None: it is not quantized."""
    for pattern, settings in (config.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            if re.match(pattern[2:], name):
                return None
        elif re.match(pattern.removeprefix("+:"), name):
            return {**config, **settings}
    return config


def gptq_weight(name: str, linear: nn.Linear, bits: int, group_size: int, *, stores_less: bool, act_order: bool) -> QuantizedWeight:
    """A linear in GPTQ's format: qweight int32 [I · bits / 32, O], qzeros int32 [G, O · bits / 32], scales float16 [G, O], g_idx int32 [I].

    stores_less: zero points are stored minus 1. act_order: the inputs of a group are not adjacent.
    """
    out_features, in_features = linear.weight.shape
    group_size, groups = groups_of(name, in_features, group_size)
    require_multiple(name, "inputs", in_features, 32)
    require_multiple(name, "outputs", out_features, 32)
    order = StoredTensor(name=f"{name}.g_idx", shape=(in_features,), dtype=torch.int32, fill=shuffled_groups(group_size))
    has_order = act_order and groups > 1
    return QuantizedWeight(
        parts=GroupedParts(
            bits=bits,
            group_size=group_size,
            codes=("gptq_codes", f"{name}.qweight", bits, in_features),
            scale=("transposed", f"{name}.scales"),
            offset=("gptq_zeros", f"{name}.qzeros", bits, out_features, int(stores_less)),
            input_groups=order.name if has_order else None,
        ),
        tensors=(
            StoredTensor(name=f"{name}.qweight", shape=(in_features * bits // 32, out_features), dtype=torch.int32),
            StoredTensor(
                name=f"{name}.qzeros",
                shape=(groups, out_features * bits // 32),
                dtype=torch.int32,
                fill=near_middle(bits, less=int(stores_less)),
            ),
            scales_tensor(f"{name}.scales", (groups, out_features), torch.float16, bits),
            *([order] if has_order else []),
        ),
        unused=(order.name,),
    )


@weight_function("gptq_codes")
def gptq_codes(words: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """GPTQ's qweight, int32 [I · bits / 32, O] → uint8 [O, I]"""
    return unpack_bits(words.t(), bits, in_features)


@weight_function("gptq_zeros")
def gptq_zeros(words: torch.Tensor, bits: int, out_features: int, added: int) -> torch.Tensor:
    """GPTQ's qzeros, int32 [G, O · bits / 32] → uint8 [O, G]. added: 1 for the format "gptq", which stores zero points minus 1"""
    stored = unpack_bits(words, bits, out_features)
    return ((stored + added) & ((1 << bits) - 1)).t().contiguous()

"""Mixtures of experts in classes of the transformers package: their expert products become our op.

transformers' `ExpertsInterface` routes the products of a block's experts to `cas::experts`, as its `AttentionInterface` does for
attention. The router is the class's own code. Checkpoints may name an expert's matrices one by one; the package's conversion mapping says
how, so that the loader can stack them.

Shape legend: T tokens, K experts of a token, X experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.models.spec import TensorPart
from compile_and_serve.models.transformers.llama4 import OUR_EXPERTS

EXPERTS = "compile_and_serve"  # our name in transformers' ExpertsInterface
_SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def use_our_experts(config: PreTrainedConfig) -> None:
    """Have the classes of this config call our op for the products of experts."""
    if has_experts(config):
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(EXPERTS, _experts_forward)
        config._experts_implementation = EXPERTS


def has_experts(config: PreTrainedConfig) -> bool:
    return any((getattr(config, name, None) or 0) > 1 for name in _SIZES)


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """None if every block of experts calls our op and computes what it computes, else the reason in one sentence."""
    blocks = [(name, module) for name, module in model.named_modules() if _stacked(module)]
    if not blocks:
        return "its experts are not one block that can be replaced"
    for name, module in blocks:
        if type(module).__name__ in OUR_EXPERTS and type(getattr(module, "act_fn", None)).__name__ == "SiLUActivation":
            continue
        if not hasattr(module, "is_transposed"):
            return f"the experts {name} cannot be replaced"
        if module.is_transposed or module.has_bias or not (module.has_gate and module.is_concatenated):
            return f"the experts {name} have biases, no gate, or another layout than gate rows before up rows"
        activation = getattr(module, "act_fn", None)
        if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation" and activation is not F.silu:
            return f"the activation of the experts {name} is not SiLU"
        if type(module)._apply_gate.__module__ != "transformers.integrations.moe":
            return f"the experts {name} have an activation of their own"
    return None


def _stacked(module: nn.Module) -> bool:
    weight = getattr(module, "gate_up_proj", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 3


def _experts_forward(module: Any, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The function that transformers calls. → [T, D]"""
    return experts(hidden_TD, ids_TK, weights_TK, module.gate_up_proj, module.down_proj)


def expert_parts(model: PreTrainedModel) -> dict[str, TensorPart]:
    """Checkpoint tensor name → the part of a stacked parameter that it is, where checkpoints name each expert's matrices."""
    parts: dict[str, TensorPart] = {}
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one.reverse_transform() for one in reversed(conversions) if type(one) is WeightRenaming]
    for name, parameter in model.named_parameters():
        converter = next((one for one in conversions if stacks_experts(one, name)), None)
        if converter is None:
            continue
        prefix = name.removesuffix(converter.target_patterns[0])
        rows = parameter.shape[1] // len(converter.source_patterns)
        for number, pattern in enumerate(converter.source_patterns):
            for expert in range(parameter.shape[0]):
                part = TensorPart(parameter=name, index=expert, first_row=number * rows, num_rows=rows)
                ours = prefix + pattern.replace("*", str(expert))
                parts[rename_source_key(ours, renamings, [], reverse=True)[0]] = part
    return parts


def stacks_experts(rule: object, name: str) -> bool:
    """Whether a rule of the conversion mapping stacks experts' matrices into this parameter, gate rows before up rows."""
    if not isinstance(rule, WeightConverter) or not name.endswith(rule.target_patterns[0]):
        return False
    kinds = [type(operation).__name__ for operation in rule.operations]
    return kinds[:1] == ["MergeModulelist"] and kinds[1:] in ([], ["Concatenate"])


def biases_as_parameters(model: PreTrainedModel) -> set[str]:
    """Turn the routers' buffers that checkpoints hold (biases of the choice) into float32 parameters, to be loaded like weights. → names"""
    kept: Mapping[str, torch.Tensor] = model.state_dict()
    names = set()
    for prefix, module in model.named_modules():
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if name in kept and buffer.is_floating_point():
                del module._buffers[leaf]
                module.register_parameter(leaf, nn.Parameter(buffer, requires_grad=False))
                names.add(name)
    return names

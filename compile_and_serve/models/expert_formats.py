"""Experts that a compressed-tensors checkpoint stores quantized: each expert's linears alone, with scales beside them.

As with unquantized experts, their tensors are parts of stacked ones: the values [X, O, I], the scales, and packed codes. Scales of static
activations are not read. Packed codes have no kernel of experts: they are dequantized while they are loaded.

Shape legend: X experts, O and I output and input features of a stacked weight, P its matrices (gate and up: 2), G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.quantization import BLOCK, Activations, ArrangedWeight, QuantizedWeight, StoredWeight, dtype_name
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.grouped_config import PACKED_FORMAT, pack_quantized
from compile_and_serve.models.spec import TensorPart

Scheme = Callable[[Mapping[str, Any], Mapping[str, Any] | None], tuple[torch.dtype, Activations, str]]


class ExpertFormats:
    """Collects the stacked weights that a config's groups quantize, and the parts of their tensors.

    parts: of the model's spec. is_target: compressed-tensors' rule for a module's name.
    """

    def __init__(self, module: nn.Module, parts: Mapping[str, TensorPart]) -> None:
        self._parameters = dict(module.named_parameters())
        self._parts: dict[str, dict[str, TensorPart]] = {}  # stacked weight → checkpoint tensor → part
        for name, part in parts.items():
            self._parts.setdefault(part.parameter, {})[name] = part
        self.quantized: dict[str, StoredWeight] = {}
        self.parts: dict[str, TensorPart] = {}
        self.unused: list[str] = []

    def add_group(self, group: Mapping[str, Any], file_format: str, dtype: Any, scheme: Scheme, is_target: Callable[[str], bool]) -> None:
        """A group of `config_groups`. dtype: the config's, which scales of packed codes have. Raises `ModelConfigError`."""
        for parameter, parts in self._parts.items():
            targets = [is_target(name.removesuffix(".weight")) for name in parts]
            if not any(targets):
                continue
            if not all(targets):
                raise ModelConfigError(
                    f"quantization_config covers only some of the experts' matrices of {parameter}: expected all or none."
                )
            weights, inputs = group.get("weights") or {}, group.get("input_activations")
            if file_format == PACKED_FORMAT:
                self._add_packed(parameter, parts, weights, inputs, dtype)
            else:
                self._add_8bit(parameter, parts, *scheme(weights, inputs))

    def _add_8bit(
        self, parameter: str, parts: Mapping[str, TensorPart], dtype: torch.dtype, activations: Activations, strategy: str
    ) -> None:
        num_experts, outputs, inputs = self._parameters[parameter].shape
        scale, rows = f"{parameter}_scale", min(part.num_rows for part in parts.values())
        if strategy == "block" and rows < outputs and rows % BLOCK:
            raise ModelConfigError(
                f"{parameter} has scales for blocks of {BLOCK} rows, which do not divide the {rows} rows of an expert's gate."
            )
        if strategy == "block":
            shape, rows_per_scale = (num_experts, -(-outputs // BLOCK), -(-inputs // BLOCK)), BLOCK
        elif strategy == "channel":
            shape, rows_per_scale = (num_experts, outputs, 1), 1
        else:
            shape, rows_per_scale = (num_experts, outputs // rows, 1), rows
        for name, part in parts.items():
            self.parts[f"{name}_scale"] = TensorPart(
                parameter=scale, index=part.index, first_row=part.first_row // rows_per_scale, num_rows=-(-part.num_rows // rows_per_scale)
            )
            self.unused.append(f"{name.removesuffix('.weight')}.input_scale")
        self.quantized[parameter] = QuantizedWeight(
            dtype=dtype, scale=scale, scale_shape=shape, per_block=strategy == "block", activations=activations
        )

    def _add_packed(
        self, parameter: str, parts: Mapping[str, TensorPart], weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, dtype: Any
    ) -> None:
        shape, target = self._parameters[parameter].shape, self._parameters[parameter].dtype
        with torch.device("meta"):
            matrix = nn.Linear(shape[2], shape[1], bias=False)
        one = pack_quantized(parameter, matrix, weights, inputs, dtype)  # of a matrix with all rows
        if one.input_groups is not None:
            raise ModelConfigError(
                f"{parameter} is quantized with act-order, which is not supported for experts: use a checkpoint without it."
            )
        tensors, arguments = [], list[str]()
        for name, tensor_shape, tensor_dtype in one.tensors:
            stacked, leaf = f"{parameter}_{name.rpartition('.weight_')[2]}", name.rpartition(".")[2]
            tensors.append((stacked, (shape[0], *tensor_shape), tensor_dtype))
            arguments.append(stacked)
            for matrix_name, part in parts.items():
                self.parts[f"{matrix_name.removesuffix('.weight')}.{leaf}"] = _rows_of_part(part, stacked, shape[1], tensor_shape[0])
        self.unused += [f"{name.removesuffix('.weight')}.{leaf}" for name in parts for leaf in ("weight_shape", "weight_g_idx")]
        function = f"dequantize_packed_experts.{dtype_name(target)}"
        self.quantized[parameter] = ArrangedWeight(
            value=(function, arguments[0], arguments[1], one.bits, shape[2], one.group_size, *arguments[2:]), tensors=tuple(tensors)
        )


def _rows_of_part(part: TensorPart, stacked: str, outputs: int, stored_rows: int) -> TensorPart:
    """The part of a stacked tensor with `stored_rows` rows for `outputs` outputs (zero points have several outputs in a word)."""
    first, count = part.first_row * stored_rows, part.num_rows * stored_rows
    if first % outputs or count % outputs:
        raise ModelConfigError(f"The zero points of {stacked} are packed across its gate and up rows, which is not supported.")
    return TensorPart(parameter=stacked, index=part.index, first_row=first // outputs, num_rows=count // outputs)

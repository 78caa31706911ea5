"""Experts of formats whose readers know linears: each expert's matrices are read as linears are, then stacked.

A checkpoint's tensors of all experts become one stacked tensor a kind, in which the P matrices of an expert (gate and up: 2) lie one after
another along the first dimension that they have. What a format does with a linear's tensors is done with those of each matrix.

Shape legend: X experts, P matrices of an expert in a stacked weight, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK
from compile_and_serve.custom_ops.stored_weight import (
    DequantizedWeight,
    GroupedParts,
    Mxfp4Parts,
    QuantizedWeight,
    StoredTensor,
    StoredWeight,
    TensorPart,
)
from compile_and_serve.custom_ops.weight_functions import WEIGHT_FUNCTIONS, Expression, Text, weight_function
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.quantization.checkpoint_format import linears_of
from compile_and_serve.models.spec import ModelSpec

_WEIGHT = ".weight"


def matrices_of(spec: ModelSpec) -> dict[str, nn.Linear]:
    """`linears_of`, and a linear for each matrix of each expert, by its name in the checkpoint."""
    shapes = {name: parameter.shape for name, parameter in spec.module.named_parameters() if parameter.dim() == 3}
    made: dict[tuple[int, int], nn.Linear] = {}
    found = linears_of(spec)
    for name, part in spec.parts.items():
        if part.parameter in shapes and name.endswith(_WEIGHT):
            size = (shapes[part.parameter][2], part.num_rows)
            if size not in made:
                made[size] = nn.Linear(*size, bias=False, device="meta")
            found[name.removesuffix(_WEIGHT)] = made[size]
    return found


def with_stacked_experts(spec: ModelSpec, stored: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """What a reader made of `matrices_of`, with one weight for each stacked parameter in place of those of its matrices.

    Raises `ModelConfigError` where the matrices of a stacked parameter differ in their format.
    """
    found = {name: one for name, one in stored.items() if name not in spec.parts}
    stacks: dict[str, dict[str, TensorPart]] = {}
    for name, part in spec.parts.items():
        stacks.setdefault(part.parameter, {})[name] = part
    for parameter, parts in stacks.items():
        given = [stored.get(name) for name in parts]
        if any(given):
            if not all(isinstance(one, QuantizedWeight) and isinstance(one.parts, GroupedParts) for one in given):
                raise ModelConfigError(f"The checkpoint quantizes only some of the experts' matrices of {parameter}: expected all or none.")
            found[parameter] = _stacked(parameter, parts, {name: stored[name] for name in parts})
    return found


def _stacked(parameter: str, parts: Mapping[str, TensorPart], stored: Mapping[str, Any]) -> StoredWeight:
    first_name, first = next(iter(stored.items()))
    one: GroupedParts = first.parts
    if any(other.parts.layout != one.layout or len(other.tensors) != len(first.tensors) for other in stored.values()):
        raise ModelConfigError(f"The experts' matrices of {parameter} are quantized in different ways, which is not supported.")
    prefix = first_name.removesuffix("weight")
    order = sorted({part.first_row for part in parts.values()})
    num_experts = 1 + max(part.index for part in parts.values())
    names: dict[str, str] = {}
    tensors: list[StoredTensor] = []
    for tensor in first.tensors:
        leaf, (rows, *rest) = tensor.name.removeprefix(prefix), tensor.shape
        names[tensor.name] = stacked = f"{parameter}_{leaf}"
        pieces = {
            f"{matrix.removesuffix('weight')}{leaf}": TensorPart(
                parameter=stacked, index=part.index, first_row=order.index(part.first_row) * rows, num_rows=rows
            )
            for matrix, part in parts.items()
        }
        tensors.append(replace(tensor, name=stacked, shape=(num_experts, len(order) * rows, *rest), stacked_from=pieces))

    def of_all(expression: Expression) -> Expression:
        if isinstance(expression, str):
            return names[expression]
        if not isinstance(expression, tuple):
            return expression
        function, *arguments = expression
        return ("of_each_expert", Text(function), len(order), *map(of_all, arguments))

    unused = tuple(name for weight in stored.values() for name in weight.unused)
    if one.input_groups is not None:  # each expert has its own order of inputs
        return DequantizedWeight(of_dtype=lambda dtype: of_all(one.plain(dtype)), tensors=tuple(tensors), unused=unused)
    if isinstance(one.scale, tuple) and isinstance(one.codes, tuple) and one.scale[0] == "powers_of_two":  # MXFP4
        blocks = ("mxfp4_blocks", of_all(one.codes[1]))
        return QuantizedWeight(parts=Mxfp4Parts(codes=blocks, scale=of_all(one.scale[1])), tensors=tuple(tensors), unused=unused)
    fields = ("codes", "scale", "offset", "scale_factor", "offset_factor", "plain_scale")
    of_every: dict[str, Any] = {name: of_all(getattr(one, name)) for name in fields}
    return QuantizedWeight(parts=replace(one, **of_every), tensors=tuple(tensors), unused=unused)


@weight_function("mxfp4_blocks")
def mxfp4_blocks(packed_XOH: torch.Tensor) -> torch.Tensor:
    """uint8 [X, O, I / 2] → [X, O, I / 32, 16]"""
    return packed_XOH.unflatten(2, (-1, MX_BLOCK // 2))


@weight_function("of_each_expert")
def of_each_expert(function: str, matrices: int, *arguments: Any) -> torch.Tensor:
    """A weight function of the tensors of each matrix. arguments: stacked tensors [X, P · rows, …], and constants. → [X, O, …]"""
    call = WEIGHT_FUNCTIONS[function].call
    num_experts = next(len(one) for one in arguments if isinstance(one, torch.Tensor))
    first = _of_expert(call, matrices, arguments, 0)
    out = first.new_empty(num_experts, *first.shape)
    for expert in range(num_experts if type(first) is torch.Tensor and not first.is_meta else 0):
        out[expert] = _of_expert(call, matrices, arguments, expert)
    return out


def _of_expert(call: Any, matrices: int, arguments: tuple[Any, ...], expert: int) -> torch.Tensor:
    split = [one[expert].chunk(matrices) if isinstance(one, torch.Tensor) else [one] * matrices for one in arguments]
    return torch.cat([call(*own) for own in zip(*split, strict=True)])

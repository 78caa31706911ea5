"""`cas::allreduce_add_rms_norm`: what follows a rowwise linear: the ranks' sum, the residual, and the next linear's norm.

`cas::allreduce_add_rms_norm_quantize` also quantizes the norm to float8, for linears with quantized activations.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.collectives.allreduce_choice import (
    ONE_SHOT,
    PUSHED,
    TWO_SHOT,
    TWO_SHOT_STORES,
    float8_like,
    fused_allreduce,
)
from compile_and_serve.custom_ops.collectives.collectives import all_reduce, gather_parts, rank_group
from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.mesh import TENSOR, Axis
from compile_and_serve.custom_ops.quantization import Quantized, quantize_activations

FLOAT8 = torch.float8_e4m3fn
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _reference(
    x_N: Sequence[torch.Tensor], residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> tuple[torch.Tensor, torch.Tensor]:
    math_dtype = torch.promote_types(residual_TD.dtype, torch.float32)
    total = residual_TD.to(math_dtype)
    for x_TD in x_N:
        total = total + x_TD.to(math_dtype)
    total = total.to(residual_TD.dtype)
    return total, F.rms_norm(total, (total.shape[1],), norm_weight_D, eps)


def _allreduce_add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = gather_parts(x_TD, rank_group(group)).unbind(0)
    return _reference(parts, residual_TD, norm_weight_D, eps)


def _allreduce_add_rms_norm_cuda(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    group: Axis = TENSOR,
    quantized: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from compile_and_serve.custom_ops.collectives import triton_allreduce  # Triton is imported where it is used
    from compile_and_serve.custom_ops.collectives.triton_allreduce_stores import two_shot_stores_allreduce_add_rms_norm
    from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm

    fused = fused_allreduce(group)
    if fused is not None and triton_allreduce.takes(x_TD, fused.memory):
        choice = fused.choice if quantized is None else fused.quantized_choice
        kernel = choice.kernel(x_TD.shape[0])
        args = (x_TD, residual_TD, norm_weight_D, eps, fused.memory, quantized)
        if kernel == PUSHED and triton_allreduce.takes_pushed(x_TD, fused.memory):
            return triton_allreduce.pushed_allreduce_add_rms_norm(*args)
        if kernel == ONE_SHOT:
            return triton_allreduce.one_shot_allreduce_add_rms_norm(*args)
        if kernel == TWO_SHOT:
            return triton_allreduce.two_shot_allreduce_add_rms_norm(*args)
        if kernel == TWO_SHOT_STORES:
            return two_shot_stores_allreduce_add_rms_norm(*args)
    normed_TD, total_TD = add_rms_norm(all_reduce(x_TD, group), residual_TD, norm_weight_D, eps, quantized)
    return total_TD, normed_TD


def _fake(x_TD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)


def _quantize_reference(
    x_N: Sequence[torch.Tensor], residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> Four:
    total_TD, normed_TD = _reference(x_N, residual_TD, norm_weight_D, eps)
    return total_TD, normed_TD, *quantize_activations(normed_TD, FLOAT8)


def _allreduce_add_rms_norm_quantize(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> Four:
    parts = gather_parts(x_TD, rank_group(group)).unbind(0)
    return _quantize_reference(parts, residual_TD, norm_weight_D, eps)


def _allreduce_add_rms_norm_quantize_cuda(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> Four:
    quantized = float8_like(x_TD)
    return *_allreduce_add_rms_norm_cuda(x_TD, residual_TD, norm_weight_D, eps, group, quantized), *quantized


ALLREDUCE_ADD_RMS_NORM = define(
    "allreduce_add_rms_norm(Tensor x, Tensor residual, Tensor norm_weight, float eps, str group='tensor') -> (Tensor, Tensor)",
    version=1,
    fake=_fake,
    across_ranks=_reference,
    CPU=_allreduce_add_rms_norm,
    CUDA=_allreduce_add_rms_norm_cuda,
)
ALLREDUCE_ADD_RMS_NORM_QUANTIZE = define(
    "allreduce_add_rms_norm_quantize(Tensor x, Tensor residual, Tensor norm_weight, float eps, str group='tensor')"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    version=1,
    fake=lambda x_TD, *_: (*_fake(x_TD), *float8_like(x_TD)),
    across_ranks=_quantize_reference,
    CPU=_allreduce_add_rms_norm_quantize,
    CUDA=_allreduce_add_rms_norm_quantize_cuda,
)


def allreduce_add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = residual + Σ over the group's ranks of x, in x's dtype; y = s / sqrt(mean(s²) + eps) · norm_weight.

    x_TD, residual_TD: [T, D] of one dtype; the residual is equal on all ranks. norm_weight_D: [D]. → s, y, each [T, D] in x's dtype,
    with the same bits on every rank.
    """
    return ALLREDUCE_ADD_RMS_NORM(x_TD, residual_TD, norm_weight_D, eps, group)


def allreduce_add_rms_norm_quantize(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, group: Axis = TENSOR
) -> Four:
    """As `allreduce_add_rms_norm`, and y quantized to float8_e4m3fn with one scale per row, as by `quantize_activations`.

    → s, y, each [T, D] in x's dtype, float8_e4m3fn [T, D], float32 [T, 1], with the same bits on every rank.
    """
    return ALLREDUCE_ADD_RMS_NORM_QUANTIZE(x_TD, residual_TD, norm_weight_D, eps, group)

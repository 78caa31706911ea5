"""`cas::experts` on CUDA: its methods for each format of weights and activations, and the choice of the fastest.

Shape legend: T tokens, K experts of a token, X experts, F intermediate size of an expert, D hidden size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from compile_and_serve.custom_ops.moe.triton_coded_experts import coded_methods
from compile_and_serve.custom_ops.moe.triton_expand_experts import dequantize
from compile_and_serve.custom_ops.moe.triton_experts import Operands, grouped_tiles, run_expanded, run_grouped
from compile_and_serve.custom_ops.moe.triton_gemv_experts import GEMV_ROWS, run_gemv
from compile_and_serve.custom_ops.quantization import BLOCK, dtype_name
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel
from compile_and_serve.custom_ops.tuning.tuner import Problem

MAX_GEMV_PAIRS = 64
MIN_EXPANDED_PAIRS_EACH = 64  # of an expert; with fewer, writing and reading the dequantized weights takes longer


@functools.lru_cache(maxsize=64)
def _measured_ids(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Ids to measure with: int32 [T, K] each. Synthetic steps route unlike real ones.

    Few pairs have an expert each, in as many ways as have no expert in common. More pairs are drawn evenly: if each expert had equally
    many, blocks of just as many pairs would be full, and look faster than they are.
    """
    num_pairs = num_tokens * top_k
    if num_pairs > num_experts:
        generator = torch.Generator(device).manual_seed(0)
        scores_TX = torch.rand(num_tokens, num_experts, generator=generator, device=device)
        return (scores_TX.topk(top_k).indices.to(torch.int32),)
    pairs = torch.arange(num_pairs, dtype=torch.int32, device=device).view(num_tokens, top_k)
    return tuple(pairs + first for first in range(0, num_experts - num_pairs + 1, num_pairs))


def _of_one_rank(ids_TK: torch.Tensor, num_experts: int, num_slots: int) -> torch.Tensor:
    """A rank's slots, if every N-th expert is on it, and `num_slots` for the others."""
    ranks = max(1, round(num_experts / num_slots))
    return torch.where(ids_TK % ranks == 0, ids_TK // ranks, num_slots).clamp(max=num_slots)


def methods(operands: Operands) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The methods for these operands by name, as functions of the gate/up weight. The first is the default."""
    if operands.gate_up.dtype == torch.int16:
        return coded_methods(operands)
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    num_pairs, num_experts, rows = operands.num_pairs, operands.num_experts, operands.gate_up.shape[1]
    rounds = operands.rounds_activations
    tiles = grouped_tiles(num_pairs, num_experts, is_float8=rounds)
    is_quantized, has_blocks = operands.scales > 0, operands.scales == 2
    if is_quantized and not rounds and num_pairs >= MIN_EXPANDED_PAIRS_EACH * num_experts:
        runs |= {f"expanded {one.name}": functools.partial(run_expanded, dequantize, one, operands) for one in tiles}
    if num_pairs <= MAX_GEMV_PAIRS and not (has_blocks and rows // 2 % GEMV_ROWS):
        runs["gemv"] = functools.partial(run_gemv, operands)
    for one in tiles:
        if not (has_blocks and one.depth > BLOCK):
            runs[one.name] = functools.partial(run_grouped, one, operands)
    return runs


def experts(operands: Operands) -> torch.Tensor:
    """`cas::experts` over plain or 8-bit weights, or codes in a Triton layout. The host does not wait for the device.

    The launches depend on T alone. The fastest method is measured once for each shape and range of T, over `_measured_ids`.
    """
    operands = operands.normalized()
    x_TD, gate_up, (num_tokens, top_k) = operands.x_TD, operands.gate_up, operands.ids_TK.shape
    if num_tokens == 0:
        return x_TD.new_empty(x_TD.shape)
    (num_slots, rows, _), hidden = gate_up.shape, x_TD.shape[1]
    experts_of_all = f" of {operands.num_experts}" if operands.is_spread else ""
    if gate_up.dtype == torch.int16:
        kind = _codes_kind(operands)
    else:
        kind = f"{gate_up.dtype}{('', ' rows', ' blocks')[operands.scales]}"
    rounding = " dynamic" if operands.rounds_activations else ""
    problem = Problem(
        kind="experts",
        name=f"X={num_slots}{experts_of_all} K={top_k} F={rows // 2} D={hidden} {kind}{rounding} {operands.activation}",
        num_tokens=num_tokens,
    )
    runs = methods(operands)
    name = fastest_kernel(problem, _with_measured_ids(runs, operands), gate_up, max_tokens=num_tokens)
    return runs[name](gate_up)


def _codes_kind(operands: Operands) -> str:
    if not operands.codes:
        return "mxfp4"
    others = [operands.gate_up_scale, operands.gate_up_offset, operands.down_scale, operands.down_offset]
    dtypes = " ".join("-" if one is None else dtype_name(one.dtype) for one in others)
    return f"{operands.codes} {dtypes}{' factors' if operands.gate_up_factor is not None else ''} {dtype_name(operands.x_TD.dtype)}"


def _with_measured_ids(
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]], operands: Operands
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """`runs` over `_measured_ids`. Calls take turns with them, so that few experts are not read from a cache.

    The ids are made at the first measurement.
    """
    turns = itertools.count()

    def measured(name: str, gate_up: torch.Tensor) -> torch.Tensor:
        num_tokens, top_k = operands.ids_TK.shape
        ids = _measured_ids(num_tokens, top_k, operands.num_experts, operands.x_TD.device)
        ids_TK = ids[next(turns) % len(ids)]
        if operands.is_spread:
            ids_TK = _of_one_rank(ids_TK, operands.num_experts, gate_up.shape[0])
        same = replace(operands, ids_TK=ids_TK)
        return methods(same)[name](gate_up)

    return {name: functools.partial(measured, name) for name in runs}

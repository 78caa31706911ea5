"""`cas::experts` on CUDA linear by linear: with LoRA adapters, or without a gate.

Adapters change gate and up before the activation, so the kernels that compute both at once do not fit. Each linear is a grouped product
over pairs (`_grouped_down_kernel` with weights of 1), followed by `cas::lora_add`, and the host never waits for the device.
Float8 activations are rounded before those products alone; adapters see them unrounded, as in dense linears.

Shape legend: T tokens, K experts of a token, P = T · K pairs, D hidden size, F intermediate size of an expert, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from compile_and_serve.custom_ops.lora.triton_lora import MAX_SORTED
from compile_and_serve.custom_ops.moe.activation import activate_rows
from compile_and_serve.custom_ops.moe.coded_linear import coded_linears
from compile_and_serve.custom_ops.moe.expert_adapters import ExpertAdapters
from compile_and_serve.custom_ops.moe.triton_coded_experts import CodeTiles, code_tiles, multiply_coded_pairs
from compile_and_serve.custom_ops.moe.triton_experts import Operands, Tiles, add_results_of_pairs, grouped_tiles, multiply_pairs, normed
from compile_and_serve.custom_ops.moe.triton_order import ExpertOrder, order_by_expert
from compile_and_serve.custom_ops.quantization import BLOCK


def experts_by_linear(operands: Operands, adapters: ExpertAdapters | None) -> torch.Tensor:
    """`cas::experts` with the adapters of its tokens, if there are any. → [T, D]"""
    operands = normed(operands.normalized())
    ids_TK, num_experts = operands.ids_TK, operands.gate_up.shape[0]
    if len(ids_TK) == 0:
        return operands.x_TD.new_empty(operands.x_TD.shape)
    multiply, tiles = _products(operands)
    order = order_by_expert(ids_TK, num_experts, tiles.block_p)
    x_PD = operands.x_TD.repeat_interleave(operands.top_k, 0)
    ones_P = torch.ones(operands.num_pairs, dtype=torch.float32, device=ids_TK.device)
    y_PO = multiply(x_PD, True, order, ones_P)
    slots_P = None if adapters is None else adapters.slots_of_pairs(ids_TK)
    if adapters is not None and slots_P is not None:
        y_PO = _by_slot(adapters.add_to_gate_up, y_PO, x_PD, slots_P)
    h_PF = activate_rows(y_PO.float(), operands.activation, operands.limit).to(x_PD.dtype)
    y_PD = multiply(h_PF, False, order, ones_P)
    if adapters is not None and slots_P is not None:
        y_PD = _by_slot(adapters.add_to_down, y_PD, h_PF, slots_P)
    weighted_PD = (y_PD.float() * operands.weights_TK.reshape(-1, 1).float()).to(y_PD.dtype)
    return add_results_of_pairs(operands, weighted_PD)


# (rows of pairs, whether they are x and not h, order, weights of pairs) → each row times its expert's gate/up or down.
Multiply = Callable[[torch.Tensor, bool, ExpertOrder, torch.Tensor], torch.Tensor]


def _products(operands: Operands) -> tuple[Multiply, Tiles | CodeTiles]:
    """With the likely best tiles; unlike without adapters, none are measured."""
    num_pairs, num_experts = operands.num_pairs, operands.num_experts
    if operands.gate_up.dtype == torch.int16:
        code, linears = code_tiles(num_pairs, num_experts)[0], coded_linears(operands, operands.gate_up)

        def multiply_codes(x_PI: torch.Tensor, is_x: bool, order: ExpertOrder, weights_P: torch.Tensor) -> torch.Tensor:
            return multiply_coded_pairs(code, operands, x_PI, linears[not is_x], order, weights_P)

        return multiply_codes, code
    tiles = grouped_tiles(num_pairs, num_experts, is_float8=operands.rounds_activations)[0]
    tiles = replace(tiles, depth=min(tiles.depth, BLOCK))
    gate_up = (operands.gate_up, operands.gate_up_scale, operands.gate_up_bias)
    down = (operands.down, operands.down_scale, operands.down_bias)

    def multiply(x_PI: torch.Tensor, is_x: bool, order: ExpertOrder, weights_P: torch.Tensor) -> torch.Tensor:
        return multiply_pairs(tiles, operands, x_PI, *(gate_up if is_x else down), order, weights_P)

    return multiply, tiles


def _by_slot(
    add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], y_PO: torch.Tensor, x_PI: torch.Tensor, slots_P: torch.Tensor
) -> torch.Tensor:
    """`add(y, x, slots)`, on rows sorted by slot where `lora_add` takes rows in their own order: neighbours have different experts."""
    if len(slots_P) <= MAX_SORTED:
        return add(y_PO, x_PI, slots_P)
    order_P = slots_P.argsort(stable=True)
    return torch.empty_like(y_PO).index_copy_(0, order_P, add(y_PO[order_P], x_PI[order_P], slots_P[order_P]))

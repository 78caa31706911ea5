"""LoRA adapters of experts: what each token's adapter adds to the linears of the experts that the token is routed to.

A pair of a token and an expert is a row of `cas::lora_add`, and an expert's part of an adapter is one of its slots: slot s of expert e
is number s · X + e.

Shape legend: T tokens, K experts of a token, P = T · K pairs, X experts, S adapter slots, R the largest rank, D hidden size, F
intermediate size of an expert, C and B blocks of N = 16 outputs of gate/up and of down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compile_and_serve.custom_ops.lora.lora_add import lora_add


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """gate_up_a: [S, X, 2R, D], rows for the gate before rows for up. gate_up_b: [S, X, C, R, N]. down_a: [S, X, R, F].
    down_b: [S, X, B, R, N]. index_T: int32 [T], as in `lora_add`.
    """

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor
    index_T: torch.Tensor

    def slots_of_pairs(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The slot of each pair, from 1; 0: its token has no adapter. → int32 [P], in the order of `ids_TK`"""
        num_experts = self.gate_up_a.shape[1]
        slot_TK = (self.index_T[:, None] - 1) * num_experts + ids_TK + 1
        return torch.where(self.index_T[:, None] > 0, slot_TK, 0).to(torch.int32).flatten()

    def add_to_gate_up(self, y_PO: torch.Tensor, x_PD: torch.Tensor, slots_P: torch.Tensor) -> torch.Tensor:
        """Gate and up [P, 2F] of the rows x with their adapters."""
        a, b = self.gate_up_a.flatten(0, 1), self.gate_up_b.flatten(0, 1)
        return lora_add(y_PO, x_PD, a, b, slots_P, [y_PO.shape[1] // 2, y_PO.shape[1]])

    def add_to_down(self, y_PD: torch.Tensor, h_PF: torch.Tensor, slots_P: torch.Tensor) -> torch.Tensor:
        """Down [P, D] of the rows h with their adapters."""
        return lora_add(y_PD, h_PF, self.down_a.flatten(0, 1), self.down_b.flatten(0, 1), slots_P, [y_PD.shape[1]])


def expert_adapters(*tensors: torch.Tensor | None) -> ExpertAdapters | None:
    """The adapters of the op's last five arguments, which torch leaves out where all are the default; None without adapters."""
    if not tensors or tensors[-1] is None:
        return None
    given = [tensor for tensor in tensors if tensor is not None]
    assert len(given) == 5, "adapters of experts are five tensors"
    return ExpertAdapters(*given)

"""Slots of LoRA adapters: where B lies."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler.weights.adapter_slots import fill_columns
from compile_and_serve.custom_ops.lora.lora_add import unblocked


@pytest.mark.parametrize("first, count", [(0, 48), (16, 32), (16, 20), (5, 32), (7, 3)])
def test_columns_go_into_whole_and_partial_blocks(first: int, count: int) -> None:
    slot_CRN = torch.zeros(4, 6, 16, dtype=torch.bfloat16)
    b_OR = torch.randn(count, 5)
    fill_columns(slot_CRN, b_OR, first)
    expected_RO = torch.zeros(6, 64)
    expected_RO[:5, first : first + count] = b_OR.T
    assert torch.equal(unblocked(slot_CRN), expected_RO.bfloat16())

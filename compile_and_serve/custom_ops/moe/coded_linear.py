"""Linears of experts over codes, as the Triton kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from compile_and_serve.custom_ops.moe.activation import num_parts
from compile_and_serve.custom_ops.moe.code_format import CodeFormat
from compile_and_serve.custom_ops.moe.triton_experts import Operands
from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK
from compile_and_serve.custom_ops.triton_common import cdiv

MXFP4_TABLE = "mxfp4"  # TABLE of the kernels for the layout of `quantized/mxfp4.py`


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """One linear of all experts in the Triton layout, with its scales, offsets and factors. inputs: I."""

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    factor: torch.Tensor | None
    bias: torch.Tensor | None
    form: CodeFormat | None  # None: MXFP4
    inputs: int

    @property
    def num_groups(self) -> int:
        return self.scale.shape[1]

    @property
    def num_blocks(self) -> int:
        """Of a row."""
        return self.scale.shape[1] if self.form is None else self.weight.shape[2] // self.form.words

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """Of the kernels. dtype: of x."""
        if self.form is None:
            return {
                "BITS": 4, "GROUP_SIZE": 32, "TABLE": MXFP4_TABLE, "MINIMA": False, "PER_FACTOR": 1, "FACTORS": 0, "WHOLE": True,
                "ROW_WORDS": MX_BLOCK, "POWER": 0.0,
            }  # fmt: skip
        bits, factor = self.form.bits, self.factor
        return {
            "BITS": bits,
            "GROUP_SIZE": self.form.group_size,
            "TABLE": self.form.table,
            "MINIMA": self.offset is not None and (factor is not None or self.offset.is_floating_point()),
            "PER_FACTOR": 1 if factor is None else cdiv(self.num_groups, factor.shape[1]),
            "FACTORS": 0 if factor is None else factor.shape[2],
            "WHOLE": self.inputs % self.form.columns == 0,
            "ROW_WORDS": self.form.words,
            "POWER": {torch.bfloat16: 128.0, torch.float16: 1024.0}.get(dtype, 0.0) if bits == 4 else 0.0,
        }


def coded_linears(operands: Operands, gate_up: torch.Tensor) -> tuple[CodedLinear, CodedLinear]:
    """Gate/up and down. gate_up: replaces the operands' weight, for the tuner."""
    o, features = operands, gate_up.shape[1] // num_parts(operands.activation)
    assert o.gate_up_scale is not None
    assert o.down_scale is not None
    first, _, second = o.codes.partition("|")
    forms = [CodeFormat.of(name) if name else None for name in (first, second)]
    return (
        CodedLinear(gate_up, o.gate_up_scale, o.gate_up_offset, o.gate_up_factor, o.gate_up_bias, forms[0], o.x_TD.shape[1]),
        CodedLinear(o.down, o.down_scale, o.down_offset, o.down_factor, o.down_bias, forms[1], features),
    )

"""The "gemv" method for experts in MXFP4: against products with the dequantized weights in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compile_and_serve.custom_ops.moe.triton_coded_gemv import GemvTiles, run_coded_gemv
from tests.custom_ops.moe.test_experts import TOLERANCE, relative_error
from tests.custom_ops.moe.test_mxfp4_experts import Case


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["1-even"])
@pytest.mark.parametrize(("num_tokens", "kind", "blocks", "dtype"), [(1, "even", 2, torch.float16), (2, "to_one", 1, torch.float32)])
def test_equals_the_definition(num_tokens: int, kind: str, blocks: int, dtype: torch.dtype) -> None:
    """In the interpreter, which has no products of a warp: `benchmarks.moe_gpu` checks those."""
    case = Case(num_tokens, kind, dtype)
    residual = torch.randn_like(case.x)
    operands = replace(case.operands(), residual_TD=residual)
    out = run_coded_gemv(GemvTiles(blocks, blocks), operands, operands.gate_up)
    assert relative_error(out, case.expected() + residual) < TOLERANCE[dtype]

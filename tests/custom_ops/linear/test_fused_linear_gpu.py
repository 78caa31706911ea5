# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""The Triton kernel of fused linears on a GPU, at odd sizes, against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.linear.triton_linear import fused_linear
from tests.support.cuda import LIMIT, random
from tests.support.numbers import relative_error


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64, 100, 256])
@pytest.mark.parametrize(
    ("out", "inner", "silu_mul"),
    [
        (576, 576, False),
        (3072, 576, True),
        (130, 1536, False),
        (4096, 4096, False),
        (37, 72, False),
        (5120, 2880, False),
        (32, 2880, False),
    ],
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_linear(out: int, inner: int, silu_mul: bool, num_tokens: int, extras: bool, dtype: torch.dtype) -> None:
    rows = out // 2 if silu_mul else out
    x, weight = random(num_tokens, inner + 8, dtype=dtype)[:, :inner], random(out, inner, dtype=dtype) * inner**-0.5
    norm, bias, residual = (
        (random(inner, dtype=dtype), random(out, dtype=dtype), random(num_tokens, rows, dtype=dtype)) if extras else (None,) * 3
    )
    y = F.rms_norm(x.double(), (inner,), norm.double(), 1e-5) if norm is not None else x.double()
    y = F.linear(y, weight.double(), bias.double() if bias is not None else None)
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    y = y + residual.double() if residual is not None else y
    result = fused_linear(x, weight, out, norm, 1e-5, bias, silu_mul, residual)
    assert result.dtype == dtype
    assert relative_error(result, y) < (2e-3 if dtype == torch.float32 else LIMIT)

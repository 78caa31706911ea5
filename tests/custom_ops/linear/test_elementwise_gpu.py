# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""Norms and SiLU-mul on a GPU, in bfloat16 and at odd sizes, against torch in float32 or float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.linear import elementwise
from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm, rms_norm, silu_mul_rows
from tests.support.cuda import LIMIT, random
from tests.support.numbers import relative_error


def test_elementwise() -> None:
    x, residual, weight = random(33, 1000)[:, :960], random(33, 960), random(960)
    assert relative_error(rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (960,), weight.float(), 1e-6)) < LIMIT
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert relative_error(normed, F.rms_norm(total.float(), (960,), weight.float(), 1e-6)) < LIMIT
    gate, up = x.float().chunk(2, dim=-1)
    assert relative_error(silu_mul_rows(x), F.silu(gate) * up) < LIMIT


@pytest.mark.parametrize("num_tokens", [1, 3, 65])
@pytest.mark.parametrize("num_features", [48, 576, 4097])
def test_row_wise_ops(num_tokens: int, num_features: int) -> None:
    x, residual = random(num_tokens, num_features + 8)[:, :num_features], random(num_tokens, num_features)
    weight, halves = random(num_features), random(num_tokens, 2 * num_features)
    total, normed = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = F.rms_norm(total.double(), (num_features,), weight.double(), 1e-5)
    assert relative_error(normed, exact) < LIMIT
    gate, up = halves.double().chunk(2, dim=-1)
    exact = F.silu(gate) * up
    out = elementwise.silu_mul(halves)
    assert out.shape == exact.shape
    assert relative_error(out, exact) < LIMIT
